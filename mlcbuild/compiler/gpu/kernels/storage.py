"""Reads stored parameters inside GPU kernels: matrices of each format, vectors, and rows of activations.

Columns are read in chunks of four. If the number of columns of a matrix is not a multiple of four, rows are
not aligned for vector loads, and values are read one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Var

from mlcbuild.compiler.gpu.tensorir import KernelBuilder, Value, bind, floating, half, lane, number, unsigned
from mlcbuild.quant.groups import GROUP

CHUNK = 4
"""Number of columns in a chunk: a vector of four values, the widest load that all targets have."""


@dataclass(frozen=True)
class StoredAs:
    """A storage format in the layout that GPU kernels read."""

    bits: int
    """Number of bits of a code; 0: weights are floating point numbers."""
    zero: int
    """The code that stands for the weight 0."""
    half: bool
    """True if scales, or floating point weights, are float16."""


FORMATS: Mapping[str, StoredAs] = {
    "f32": StoredAs(0, 0, half=False),
    "f16": StoredAs(0, 0, half=True),
    "q4f32": StoredAs(4, 7, half=False),
    "q4f16": StoredAs(4, 7, half=True),
    "q8f32": StoredAs(8, 127, half=False),
    "q8f16": StoredAs(8, 127, half=True),
}
"""Name of a format -> how GPU kernels read its tensors. The targets' table of layouts has the same names."""


@dataclass(frozen=True)
class StoredMatrix:
    """The stored tensors of a matrix [rows, columns] as buffers of a kernel."""

    form: StoredAs
    rows: int
    columns: int
    words: Value
    scales: Value | None

    @classmethod
    def declare(cls, k: KernelBuilder, form: StoredAs, rows: int, columns: int) -> StoredMatrix:
        groups = -(-columns // GROUP)
        if form.bits:
            vectors = groups * form.bits // CHUNK
            words = k.buffer("w", (rows, vectors), "uint32x4")
            count = rows * groups
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

    def scale(self, row: Value, group: Value) -> Value | None:
        """Returns the scale of a group of 32 weights; None for a format without scales."""
        if self.scales is None:
            return None
        flat = bind(row * self.groups + group)
        if not self.form.half:
            return bind(self.scales[flat])
        word = bind(self.scales[flat // 2])
        return bind(half(word, flat % 2 == 1))

    def group(self, row: Value, group: Value) -> list[Value]:
        """Returns the words that hold a group's codes, which `chunk` requires; [] for floating
        point numbers.
        """
        if not self.form.bits:
            return []
        vectors = self.form.bits // CHUNK
        loads = [bind(self.words[row, group * vectors + index]) for index in range(vectors)]
        return [bind(lane(vector, index)) for vector in loads for index in range(4)]

    def chunk(self, words: Sequence[Value], row: Value, group: Value, index: int) -> list[Value]:
        """Returns four weights without their scale: chunk `index` of a group whose words `group` returned.
        Values beyond the matrix's columns are arbitrary.
        """
        if self.form.bits:
            first = CHUNK * index * self.form.bits
            mask = T.uint32((1 << self.form.bits) - 1)
            codes = []
            for place in range(CHUNK):
                word, shift = divmod(first + place * self.form.bits, 32)
                code = T.bitwise_and(T.shift_right(words[word], T.uint32(shift)), mask)
                codes.append(floating(T.Cast("int32", code) - self.form.zero))
            return codes
        column = bind(group * (GROUP // CHUNK) + index)
        if self.columns % CHUNK == 0:
            vector = bind(self.words[row, T.min(column, self.columns // CHUNK - 1)])
            return unpacked(vector, self.form.half)
        return [self.number(row, T.min(column * CHUNK + place, self.columns - 1)) for place in range(CHUNK)]

    def number(self, row: Value, column: Value) -> Value:
        """Returns one weight of the matrix, scaled."""
        if self.form.bits:
            place = 32 // self.form.bits
            index = bind(column // place)
            vector = bind(self.words[row, index // 4])
            word = bind(select_lane(vector, index % 4))
            shift = unsigned(column % place * self.form.bits)
            code = T.bitwise_and(T.shift_right(word, shift), T.uint32((1 << self.form.bits) - 1))
            scale = self.scale(row, column // GROUP)
            return floating(T.Cast("int32", code) - self.form.zero) * scale
        if self.columns % CHUNK == 0:
            vector = bind(self.words[row, column // CHUNK])
            values = unpacked(vector, self.form.half)
            return select(values, column % CHUNK)
        return flat_number(self.words, bind(row * self.columns + column), self.form.half)


def unpacked(vector: Value, is_half: bool) -> list[Value]:
    """Returns the four numbers in a vector: a float32x4, or a uint32x2 that holds float16."""
    if not is_half:
        return [lane(vector, index) for index in range(CHUNK)]
    return [half(lane(vector, index // 2), bool(index % 2)) for index in range(CHUNK)]


def select(values: Sequence[Value], index: Value) -> Value:
    """Returns values[index] for an index that is an expression of the kernel."""
    chosen = values[-1]
    for place in reversed(range(len(values) - 1)):
        chosen = T.Select(index == place, values[place], chosen)
    return chosen


def select_lane(vector: Value, index: Value) -> Value:
    return select([lane(vector, place) for place in range(4)], index)


def flat_number(buffer: Value, index: Value, is_half: bool) -> Value:
    """Returns element `index` of a flat buffer of float32, or of pairs of float16 in uint32."""
    if not is_half:
        return bind(buffer[index])
    return bind(half(bind(buffer[index // 2]), index % 2 == 1))


@dataclass(frozen=True)
class Vector:
    """A stored parameter that is a vector."""

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
    """Rows [n, columns] of float32 activations."""

    columns: int
    values: Value

    @classmethod
    def declare(cls, k: KernelBuilder, name: str, n: Var, columns: int) -> RowsOf:
        if columns % CHUNK == 0:
            return cls(columns, k.buffer(name, (n, columns // CHUNK), "float32x4"))
        return cls(columns, k.buffer(name, (n, columns)))

    def chunk(self, row: Value, column: Value) -> list[Value]:
        """Returns the numbers of columns 4 * column to 4 * column + 3, with 0 beyond the row."""
        if self.columns % CHUNK == 0:
            whole = self.columns // CHUNK
            vector = bind(self.values[row, T.min(column, whole - 1)])
            values = [lane(vector, index) for index in range(CHUNK)]
            if whole % (GROUP // CHUNK) == 0:
                return values
            return [bind(T.Select(column < whole, value, number(0))) for value in values]
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
