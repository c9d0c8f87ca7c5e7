"""Emits products of 8-bit integers in GPU kernels, four at a time, for schemes with 8-bit activations. The
activations of a group of 32 columns are rounded as CPUs round them: to int8, with a scale of max |x| / 127.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.normed_factors import Factors
from mlcbuild.compiler.gpu.kernels.storage import CHUNK, StoredAs, StoredMatrix
from mlcbuild.compiler.gpu.tensorir import Value, bind, either, exact, floating, local, number, put
from mlcbuild.quant.groups import GROUP

_SMALLEST = 1e-30
"""A group of 32 activations is rounded to zeros if its largest absolute value is at most this. Otherwise 127
/ max |x|, by which activations are multiplied when they are rounded to int8, might be infinite."""
_ONES, _LOW_CODES, _SIGNS = T.uint32(0x01010101), T.uint32(0x0F0F0F0F), T.uint32(0x80808080)


def can_pack(form: StoredAs) -> bool:
    """Returns True if a GPU kernel can multiply a format's stored codes as packed bytes, because a few
    instructions turn them into the four bytes of a 32-bit word. That is so for 4-bit codes, and for 8-bit
    codes that represent the weight 0 by 128, unless codes stand for integers of a table."""
    return form.table is None and (form.bits == 4 or (form.bits == 8 and form.zero == 128))


def packed_group_sums(
    matrix: StoredMatrix, matrix_rows: Sequence[Value], group: Value, sums: Value, factors: Factors
) -> None:
    """Emits code that adds the products of rows of x, rounded to int8, with rows of W over 32 columns to
    `sums`, an array of registers [row of x, row of W]. matrix_rows: indices of the rows of W; group: index of
    the 32 columns; factors: the object whose methods emit reads of the rows of x.
    """
    form, runs, chunks = matrix.form, matrix.runs, GROUP // CHUNK
    codes = [_packed_codes(form, matrix.group(row, group)) for row in matrix_rows]
    scales = [matrix.scales(row, group) for row in matrix_rows]
    columns = [bind(group * chunks + index) for index in range(chunks)]
    norms = [factors.of_norm(column) for column in columns]
    # Arrays, because TVM puts the expression of a definition wherever the definition is used.
    values, words, totals = local(GROUP), local(chunks, "uint32"), local(runs, "int32")
    step, product = local(1), local(1, "int32")
    zero, each = form.zero if form.bits == 4 else 0, chunks // runs
    with T.serial(factors.block.count) as x_row:
        for index, (column, norm) in enumerate(zip(columns, norms, strict=True)):
            for place, value in enumerate(factors.chunk(x_row, column, norm)):
                put(values, value, index * CHUNK + place)
        _round(form, values, words, step)
        for run in range(runs):
            _dot(totals, run, [(words[at], _ONES) for at in range(run * each, (run + 1) * each)])
        for place, of_row in enumerate(scales):
            at = x_row * len(matrix_rows) + place
            for run, (scale, minimum) in enumerate(of_row):
                _dot(product, 0, [(words[i], codes[place][i]) for i in range(run * each, (run + 1) * each)])
                value = floating(product[0] - totals[run] * zero) * scale
                value = value if minimum is None else value + floating(totals[run]) * minimum
                put(sums, value * step[0] + sums[at], at)


def _dot(out: Value, place: int, pairs: Sequence[tuple[Value, Value]]) -> None:
    """Emits code that sets out[place], an int32, to a sum of dot products, one for each pair in `pairs`. A
    pair consists of two uint32, each of which holds four signed bytes that are multiplied with those of the
    other."""
    put(out, T.int32(0), place)
    for left, right in pairs:
        put(out, out[place] + T.call_pure_extern("int32", "dot4I8Packed", left, right), place)


def _packed_codes(form: StoredAs, words: Sequence[Value]) -> list[Value]:
    """Returns the codes of 32 weights as eight words of four bytes. 8-bit codes are signed, minus 128, in the
    order of the columns. 4-bit codes are 0 to 15; of each eight columns, one word has the codes of the even
    columns, and the next those of the odd ones.
    """
    if form.bits == 8:
        return [bind(T.bitwise_xor(word, _SIGNS)) for word in words]
    halves = [(word, T.shift_right(word, T.uint32(4))) for word in words]
    return [bind(T.bitwise_and(half, _LOW_CODES)) for pair in halves for half in pair]


def _round(form: StoredAs, values: Value, words: Value, step: Value) -> None:
    """Emits the rounding of `values`, an array of 32 activations, to int8. It stores them, four to a uint32,
    in the array `words` in the order of the columns (for 4-bit weights the even columns before the odd ones
    in each eight), and their scale, max |x| / 127, in step[0]. `values` is overwritten."""
    put(step, number(0), 0)
    for index in range(GROUP):
        put(step, T.max(step[0], T.max(values[index], -values[index])), 0)
    inverse = local(1)
    put(inverse, either(step[0] > exact(_SMALLEST), number(127) / step[0], number(0)), 0)
    for index in range(GROUP):
        put(values, values[index] * inverse[0], index)
    for index in range(GROUP // CHUNK):
        first, stride = CHUNK * index, 1
        if form.bits == 4:
            first, stride = index // 2 * 8 + index % 2, 2
        four = [values[first + stride * place] for place in range(CHUNK)]
        put(words, T.call_pure_extern("uint32", "packed", *four), index)
    put(step, step[0] * exact(1 / 127), 0)
