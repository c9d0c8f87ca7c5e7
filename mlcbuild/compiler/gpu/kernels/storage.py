"""Emits reads of stored parameters in GPU kernels: matrices of each format, vectors, and rows of activations.

Columns are read in chunks of four. If an unquantized matrix, or activations, have a number of columns that is
not a multiple of four, rows are not aligned for vector loads, and values are read one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Var

from mlcbuild.compiler.gpu.kernels.code_values import float_value, table_value
from mlcbuild.compiler.gpu.tensorir import KernelBuilder, Value, bind, floating, half, lane, number, unsigned
from mlcbuild.quant.blocks import BLOCK_WEIGHTS, Blocks, FloatCode
from mlcbuild.quant.format import load_format
from mlcbuild.quant.groups import GROUP, low_bits, row_words

CHUNK = 4
"""Number of consecutive columns of a matrix row that a GPU kernel reads at a time, as one vector: four
values, the widest load that all GPU targets have."""


@dataclass(frozen=True)
class StoredAs:
    """The form in which a format stores weight matrices row by row, as GPU kernels read them: the bits of
    codes, the scales and the minima, or floating point numbers."""

    bits: int
    """Number of bits of a weight's stored code; 0: weights are floating point numbers."""
    zero: int
    """The zero point of a format: the number that is subtracted from a stored code before it is multiplied by
    the scale."""
    half: bool
    """True if each scale, or each weight of an unquantized matrix, is a float16; False if it is a float32, or
    if `levels` describes the scales."""
    group: int = GROUP
    """Number of consecutive weights of a row that share a scale, 16 or 32; without meaning for floating point
    weights."""
    minimum: bool = False
    """True if a minimum is added to the weights of a group: a float16 or, with `levels`, the product of an
    integer of the group and a float16 that 256 weights share."""
    levels: bool = False
    """True if a scale is the product of an integer of the group and a float16 that 256 weights share."""
    floats: FloatCode | None = None
    """The kind of 8-bit floats that codes are; None: they are integers."""
    table: tuple[int, ...] | None = None
    """The integers, -128 to 127, for which 4-bit codes stand; None: codes stand for themselves."""

    @classmethod
    def of(cls, blocks: Blocks) -> StoredAs:
        """Returns the StoredAs, which describes a format to GPU kernels, for a format whose codes, scales and
        minima `blocks` describes."""
        levels = blocks.scale == "levels"
        half = blocks.scale == "float16"
        kinds = blocks.floats, blocks.table
        return cls(blocks.bits, blocks.zero, half, blocks.group, blocks.minimum, levels, *kinds)

    @property
    def block_words(self) -> int:
        """Returns the number of 32-bit words that hold the scales and minima of 256 weights in a format with
        two-level scales: one word with the float16 numbers that all of these weights share, then the bytes
        that belong to single groups.
        """
        return 1 + self.minimum_word * (1 + self.minimum)

    @property
    def minimum_word(self) -> int:
        """Returns the number of 32-bit words with the integer factors of the scales of 256 weights, one byte
        for each group, in a format with two-level scales. As many words with the factors of minima follow if
        there are any.
        """
        return BLOCK_WEIGHTS // self.group // 4


_PLAIN: Mapping[str, StoredAs] = {
    "f32": StoredAs(0, 0, half=False),
    "f16": StoredAs(0, 0, half=True),
    "q4f32": StoredAs(4, 7, half=False),
    "q4f16": StoredAs(4, 7, half=True),
    "q8f32": StoredAs(8, 127, half=False),
    "q8f16": StoredAs(8, 127, half=True),
    "q4s": StoredAs(4, 8, half=True),
    "q5s": StoredAs(5, 16, half=True),
    "q8s": StoredAs(8, 128, half=True),
}


def stored_as(name: str) -> StoredAs:
    """Returns a StoredAs: the bits, scales and minima by which the stored format `name`, such as q4f16, holds
    weights, for GPU kernels. Raises UsageError if no format with this name is stored row by row.
    """
    if name in _PLAIN:
        return _PLAIN[name]
    blocks = load_format(name, "row").blocks
    assert blocks is not None, "the targets' table of layouts has no other formats"
    return StoredAs.of(blocks)


Scale: TypeAlias = tuple[Value, Value | None]
"""The numbers by which a group of weights is dequantized, as float32 expressions: (scale, minimum that is
added, or None if nothing is added)."""


@dataclass(frozen=True)
class StoredMatrix:
    """Emits reads of a stored matrix [rows, columns], whose tensors are buffers of a kernel."""

    form: StoredAs
    rows: int
    columns: int
    words: Value
    numbers: Value | None
    """The buffer with the scales, and minima if the format has them, of a quantized matrix; None for floating
    point weights."""

    @classmethod
    def declare(cls, k: KernelBuilder, form: StoredAs, rows: int, columns: int) -> StoredMatrix:
        groups = -(-columns // GROUP)
        if form.bits:
            words = k.buffer("w", (rows, row_words(form.bits, columns) // CHUNK), "uint32x4")
            if form.levels:
                count = rows * -(-columns // BLOCK_WEIGHTS) * form.block_words
                return cls(form, rows, columns, words, k.buffer("s", (count,), "uint32"))
            count = rows * groups * (GROUP // form.group)
            if form.minimum:
                return cls(form, rows, columns, words, k.buffer("s", (count,), "uint32"))
            shape, dtype = ((-(-count // 2),), "uint32") if form.half else ((count,), "float32")
            return cls(form, rows, columns, words, k.buffer("s", shape, dtype))
        if columns % CHUNK == 0:
            dtype = "uint32x2" if form.half else "float32x4"
            return cls(form, rows, columns, k.buffer("w", (rows, columns // CHUNK), dtype), None)
        count = rows * columns
        shape, dtype = ((-(-count // 2),), "uint32") if form.half else ((count,), "float32")
        return cls(form, rows, columns, k.buffer("w", shape, dtype), None)

    @property
    def groups(self) -> int:
        return -(-self.columns // GROUP)

    @property
    def runs(self) -> int:
        """Returns the number of scales in a group of 32 weights: 1, or 2 if each half has its own."""
        return GROUP // self.form.group

    def scales(self, row: Value, group: Value) -> list[Scale]:
        """Emits loads of the scales of one group of 32 weights of a row, and returns a list of pairs (scale,
        minimum or None) of float32 expressions: one pair if all 32 weights share a scale, two if each half
        has its own; [] if the matrix has no scales."""
        if self.numbers is None:
            return []
        if self.form.levels:
            return self._levels(self.numbers, row, group)
        flat = bind((row * self.groups + group) * self.runs)
        if self.form.minimum:
            word = bind(self.numbers[flat])
            return [(bind(half(word, False)), bind(half(word, True)))]
        if not self.form.half:
            return [(bind(self.numbers[flat + run]), None) for run in range(self.runs)]
        word = bind(self.numbers[flat // 2])
        return [(bind(half(word, flat % 2 == 1)), None)]

    def _levels(self, numbers: Value, row: Value, group: Value) -> list[Scale]:
        form, each = self.form, BLOCK_WEIGHTS // GROUP
        blocks = -(-self.columns // BLOCK_WEIGHTS)
        base = bind((row * blocks + group // each) * form.block_words)
        first, inside = bind(numbers[base]), group % each * self.runs
        steps = [bind(numbers[base + 1 + inside // 4])]
        if form.minimum:
            steps.append(bind(numbers[base + 1 + form.minimum_word + inside // 4]))
        scales = []
        for run in range(self.runs):
            shift = unsigned(inside % 4 * 8 + run * 8)
            codes = [T.bitwise_and(T.shift_right(word, shift), T.uint32(255)) for word in steps]
            signed = T.Cast("int32", T.bitwise_xor(codes[0], T.uint32(128))) - 128
            scale = bind(half(first, False) * floating(signed))
            minimum = bind(half(first, True) * floating(codes[1])) if form.minimum else None
            scales.append((scale, minimum))
        return scales

    def group(self, row: Value, group: Value) -> list[Value]:
        """Emits loads of the 32-bit words that hold the codes of a group of 32 weights of a row, and returns
        them: first the words with the low bits of the codes, then those with the high bits if the format
        stores these separately (3, 5 and 6 bits); [] for floating point numbers."""
        bits = self.form.bits
        if not bits:
            return []
        low = low_bits(bits)
        if low < 4:
            vector, upper = bind(self.words[row, group // 2]), group % 2 == 1
            words = [bind(T.Select(upper, lane(vector, 2 + i), lane(vector, i))) for i in range(low)]
        else:
            loads = [bind(self.words[row, group * (low // 4) + index]) for index in range(low // 4)]
            words = [bind(lane(vector, index)) for vector in loads for index in range(4)]
        return words + [self._high(row, group * (bits - low) + index) for index in range(bits - low)]

    def _high(self, row: Value, index: Value) -> Value:
        """Returns a 32-bit word with the high bits of a row's codes (quantized weights). Formats of 3, 5 and
        6 bits store them separately, after the words with the low bits of the codes: two low bits per code
        for 3-bit codes, four for others. index: number of the word among those with high bits, from 0."""
        vectors, rest = divmod(self.groups * low_bits(self.form.bits), 4)
        index = index + rest
        vector = bind(self.words[row, vectors + index // 4])
        return bind(select_lane(vector, index % 4))

    def chunk(self, words: Sequence[Value], row: Value, group: Value, index: int) -> list[Value]:
        """Returns four columns of a group of 32 weights, from column 4 * index on, as float32 expressions:
        stored codes minus the format's zero point, not yet scaled, or the weights themselves if they are
        floating point. words: the 32-bit words that hold the group's codes, as the method `group` returns
        them. Values beyond the matrix's columns are arbitrary."""
        bits = self.form.bits
        if bits:
            low = low_bits(bits)
            word, shift = divmod(CHUNK * index * low, 32)
            if bits == low:
                return self._codes(words[word], shift)
            above, place = divmod(CHUNK * index * (bits - low), 32)
            return self._codes(words[word], shift, words[low + above], place)
        column = bind(group * (GROUP // CHUNK) + index)
        if self.columns % CHUNK == 0:
            vector = bind(self.words[row, T.min(column, self.columns // CHUNK - 1)])
            return unpacked(vector, self.form.half)
        return [self.number(row, T.min(column * CHUNK + place, self.columns - 1)) for place in range(CHUNK)]

    def chunk_at(self, row: Value, group: Value, chunk: Value) -> list[Value]:
        """Returns four dequantized weights of a row, float32: those in columns 4 * chunk to 4 * chunk + 3 of
        a group of 32, where `chunk` may be an expression of the kernel. Values beyond the matrix's columns
        are arbitrary.
        """
        if not self.form.bits:
            column = bind(group * (GROUP // CHUNK) + chunk)
            if self.columns % CHUNK == 0:
                vector = bind(self.words[row, T.min(column, self.columns // CHUNK - 1)])
                return unpacked(vector, self.form.half)
            last = self.columns - 1
            return [self.number(row, bind(T.min(column * CHUNK + place, last))) for place in range(CHUNK)]
        return self._scaled(self._codes_at(row, group, chunk, CHUNK), row, group, chunk * CHUNK)

    def _scaled(self, codes: list[Value], row: Value, group: Value, inside: Value) -> list[Value]:
        """Returns float32 expressions for some weights of a group of 32 in a row, code * scale + minimum,
        with the scale and the minimum that it loads for this group; the minimum is left out if the format has
        none. codes: stored codes, minus the format's zero point, of weights that share a scale; inside:
        position in the group of any of them, since each half of the group may have its own scale."""
        scales = self.scales(row, group)
        scale, minimum = scales[0]
        if len(scales) > 1:
            upper = bind(inside >= self.form.group)
            scale = bind(T.Select(upper, scales[1][0], scale))
            minimum = minimum if minimum is None else bind(T.Select(upper, scales[1][1], minimum))
        return [code * scale if minimum is None else code * scale + minimum for code in codes]

    def _codes_at(self, row: Value, group: Value, index: Value, width: int) -> list[Value]:
        """Returns `width` stored codes of a group of 32 weights, from index * width on, as float32
        expressions, minus the format's zero point. width: 1 or 4."""
        bits = self.form.bits
        low = low_bits(bits)
        place = bind(group * low + index * (width * low) // 32)
        word = bind(select_lane(bind(self.words[row, place // 4]), place % 4))
        shift = bind(unsigned(index * (width * low) % 32))
        if bits == low:
            return self._codes(word, shift, count=width)
        high = self._high(row, bind(group * (bits - low) + index * (width * (bits - low)) // 32))
        above = bind(unsigned(index * (width * (bits - low)) % 32))
        return self._codes(word, shift, high, above, count=width)

    def _codes(
        self,
        word: Value,
        shift: Value | int,
        high: Value | None = None,
        high_shift: Value | int = 0,
        count: int = CHUNK,
    ) -> list[Value]:
        """Returns `count` consecutive weights of a quantized matrix as float32 expressions, not yet scaled:
        stored codes minus the format's zero point. The low bits of the codes are in the 32-bit word `word`,
        from bit `shift` on. If the format stores the bits above them separately, these are in the word
        `high`, from bit `high_shift` on; None: there are no such bits."""
        low, codes = low_bits(self.form.bits), []
        for place in range(count):
            code = _bits(word, shift, place, low)
            if high is not None:
                above = _bits(high, high_shift, place, self.form.bits - low)
                code = T.bitwise_or(code, T.shift_left(above, T.uint32(low)))
            codes.append(self._value(bind(code)))
        return codes

    def _value(self, code: Value) -> Value:
        if self.form.floats is not None:
            return float_value(self.form.floats, code)
        if self.form.table is not None:
            return table_value(self.form.table, code)
        return floating(T.Cast("int32", code) - self.form.zero)

    def number(self, row: Value, column: Value) -> Value:
        """Returns the dequantized weight in row `row` and column `column` of the matrix, as a float32
        expression.
        """
        if self.form.bits:
            group, inside = bind(column // GROUP), bind(column % GROUP)
            return self._scaled(self._codes_at(row, group, inside, 1), row, group, inside)[0]
        if self.columns % CHUNK == 0:
            vector = bind(self.words[row, column // CHUNK])
            values = unpacked(vector, self.form.half)
            return select(values, column % CHUNK)
        return flat_number(self.words, bind(row * self.columns + column), self.form.half)


def _bits(word: Value, shift: Value | int, place: int, width: int) -> Value:
    """Returns a uint32 expression for one code (quantized weight) of several that a 32-bit word holds. shift:
    bit of the word at which the codes begin; place: index of the code, counted from that bit; width: bits per
    code."""
    first = T.uint32(shift + place * width) if isinstance(shift, int) else shift + T.uint32(place * width)
    return T.bitwise_and(T.shift_right(word, first), T.uint32((1 << width) - 1))


def unpacked(vector: Value, is_half: bool) -> list[Value]:
    """Returns a list of four float32 expressions, the numbers in a vector. With `is_half` the vector is a
    uint32x2 that holds float16, the first of each two in the low bits; otherwise it is a float32x4."""
    if not is_half:
        return [lane(vector, index) for index in range(CHUNK)]
    return [half(lane(vector, index // 2), bool(index % 2)) for index in range(CHUNK)]


def select(values: Sequence[Value], index: Value) -> Value:
    """Returns the expression values[index], where `index` is an expression whose value is known only when the
    kernel runs; the last value for an index beyond the list."""
    chosen = values[-1]
    for place in reversed(range(len(values) - 1)):
        chosen = T.Select(index == place, values[place], chosen)
    return chosen


def select_lane(vector: Value, index: Value) -> Value:
    return select([lane(vector, place) for place in range(4)], index)


def flat_number(buffer: Value, index: Value, is_half: bool) -> Value:
    """Returns element `index`, as float32, of a flat buffer of float32, or of pairs of float16 in uint32."""
    if not is_half:
        return bind(buffer[index])
    return bind(half(bind(buffer[index // 2]), index % 2 == 1))


@dataclass(frozen=True)
class Vector:
    """A stored model parameter that is a vector, such as a norm's weight; indexing returns a float32
    expression.
    """

    half: bool
    values: Value

    @classmethod
    def declare(cls, k: KernelBuilder, name: str, size: int, is_half: bool) -> Vector:
        shape, dtype = ((-(-size // 2),), "uint32") if is_half else ((size,), "float32")
        return cls(is_half, k.buffer(name, shape, dtype))

    def __getitem__(self, index: Value) -> Value:
        return flat_number(self.values, index, self.half)


@dataclass(frozen=True)
class RowsOf:
    """Emits reads of float32 activations [n, columns] from a GPU buffer, four columns of a row at a time, and
    returns the numbers as expressions."""

    columns: int
    values: Value

    @classmethod
    def declare(cls, k: KernelBuilder, name: str, n: Var, columns: int) -> RowsOf:
        if columns % CHUNK == 0:
            return cls(columns, k.buffer(name, (n, columns // CHUNK), "float32x4"))
        return cls(columns, k.buffer(name, (n, columns)))

    def chunk(self, row: Value, column: Value) -> list[Value]:
        """Returns the four numbers in columns 4 * column to 4 * column + 3 of a row, with 0 beyond the end of
        the row, up to the next multiple of 32 columns. column: index of a chunk of four columns, not of one.
        """
        if self.columns % CHUNK == 0:
            full_chunks = self.columns // CHUNK
            vector = bind(self.values[row, T.min(column, full_chunks - 1)])
            values = [lane(vector, index) for index in range(CHUNK)]
            if full_chunks % (GROUP // CHUNK) == 0:
                return values
            return [bind(T.Select(column < full_chunks, value, number(0))) for value in values]
        return [
            bind(
                T.Select(
                    column * CHUNK + place < self.columns,
                    self.values[row, T.min(column * CHUNK + place, self.columns - 1)],
                    number(0),
                )
            )
            for place in range(CHUNK)
        ]
