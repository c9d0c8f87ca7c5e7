"""Emits the products of weights in one group of 32 columns with some rows of activations x, multiplied by
their scales and added to a register tile of float32 sums.

Before scaling, sums over a group are integers and exact, so it does not matter which instruction computes
them: rows of x that are multiplied two at a time get the same bits as a row alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.tiled_matrix import TiledMatrix
from mlcbuild.compiler.cpu.kernels.vectors import Register, fma, register, shuffle, splat
from mlcbuild.quant.groups import QUADS


@dataclass(frozen=True)
class Column:
    """The weights of one group of 32 columns in as many matrix rows as a vector register has int32 lanes,
    with the weights' scales and minima.
    """

    operands: list[list[Expr]]
    """The int32 vectors of weights that dot-product instructions multiply: a list of one or two for each quad
    (four consecutive columns) of a group of 32, with a lane for each weight row; two hold columns 0 and 2,
    then 1 and 3, as int16. For an instruction that multiplies two rows of x at a time, each two quads have
    two lists of one vector instead: eight columns of weight rows 0 and 1, then of rows 2 and 3.
    """
    scales: list[Expr]
    """float32 vectors with the scales of a group of 32 columns, one lane for each weight row: two vectors if
    each half of the group has its own scales, else one.
    """
    minima: list[Expr]
    """float32 vectors with the minima of a group of 32 columns, one lane for each weight row, where a weight
    is scale * code + minimum: two vectors if each half of the group has its own minima, else one; [] for
    weights without minima.
    """


@dataclass(frozen=True)
class ActivationRows:
    """Rows of activations x, quantized to int8, that one matrix product reads."""

    matrix: TiledMatrix
    records: Buffer
    """The quantized rows of x, int32 [rows, stride], in the layout of `Records`. A row holds, for each group
    of 32 values, first their packed codes, then one int32 each: their scale; for each scale of the group's
    weights (1 or 2) a correction for unsigned weight codes; and, if weights have minima, as many sums of
    activations.
    """
    rows: Sequence[Expr]
    """Indices of the rows of activations to multiply, in the buffer that holds activations quantized to
    int8."""


def paired(matrix: TiledMatrix, rows: int) -> bool:
    """Returns True if the instruction set can multiply two rows of activations at a time, and `rows`, the
    number of rows, is even."""
    return matrix.dot.row_pairs and rows % 2 == 0


def add_group(
    x: ActivationRows, group: Expr, columns: Sequence[Column], acc: Sequence[Sequence[Register]]
) -> None:
    """Emits acc[i][c] += the product, over the 32 columns of group `group`, of the i-th row of x with the
    weights columns[c], for each i and c, with scales and minima applied. acc: [row of x][item of `columns`],
    float32 vectors with a lane for each weight row.
    """
    isa, form, records = x.matrix.isa, x.matrix.records, x.records
    products = _pair_products if paired(x.matrix, len(x.rows)) else _quad_products
    with x.matrix.dot.adding():
        for half in range(form.halves):
            totals = products(x, group, half, columns)
            for i, row in enumerate(x.rows):
                for c, column in enumerate(columns):
                    sums, scales = form.factors(records, row, group, totals[i][c], column.scales[half])
                    acc[i][c].set(fma(sums, scales, acc[i][c].value, isa.lanes))
                    if form.sums:
                        weight = splat(form.sum(records, row, group, half), isa.lanes)
                        acc[i][c].set(fma(column.minima[half], weight, acc[i][c].value, isa.lanes))


def _quad_products(x: ActivationRows, group: Expr, half: int, columns: Sequence[Column]) -> list[list[Expr]]:
    """Emits the integer dot products of rows of x with weights over the columns that share a scale: a whole
    group of 32 (half = 0) or, if each half has a scale, its half with the index `half`, 0 or 1. Returns int32
    vectors, with a lane for each weight row, as [row of x][item of `columns`]. columns: the group's weights,
    an item for each vector of weight rows.
    """
    isa, form, products = x.matrix.isa, x.matrix.records, x.matrix.dot
    kind, count = ("int16", 2 * isa.lanes) if products.narrow else ("int32", isa.lanes)
    corrections = [form.correction(x.records, row, group, half) for row in x.rows]
    size = QUADS // form.halves
    quads = products.unpacked_order(range(half * size, (half + 1) * size))
    sums: list[list[list[Expr]]] = []
    for first in range(0, size, products.run):
        totals = [[register(products.start(c), count, kind) for _ in columns] for c in corrections]
        for quad in quads[first : first + products.run]:
            # Unpacked just before they are used: eight quads would not fit the registers.
            operands = [[T.bind(operand) for operand in column.operands[quad]] for column in columns]
            for i, row in enumerate(x.rows):
                activations = form.activations(x.records, row, group, quad)
                for c, weights in enumerate(operands):
                    for operand, a in zip(weights, activations, strict=True):
                        total = totals[i][c]
                        total.set(products.step(total.value, operand, a))
        sums.append([[T.bind(products.widened(total.value)) for total in line] for line in totals])
    if products.narrow and (products.offset or form.powers):
        sums.append([[splat(correction, isa.lanes) for _ in columns] for correction in corrections])
    return [
        [reduce(operator.add, cells) for cells in zip(*lines, strict=True)]
        for lines in zip(*sums, strict=True)
    ]


def _pair_products(x: ActivationRows, group: Expr, half: int, columns: Sequence[Column]) -> list[list[Expr]]:
    """Emits the integer dot products of an even number of rows of x, two rows at a time, with weights over
    the columns that share a scale: a whole group of 32 (half = 0) or, if each half has a scale, its half with
    the index `half`, 0 or 1. Returns int32 vectors, with a lane for each weight row, as [row of x][item of
    `columns`]. columns: the group's weights, an item for each vector of weight rows.

    While they are summed, a register holds four sums [row of x, row of weights]: of weight rows 0 and 1 in
    the first of two registers, of rows 2 and 3 in the second.
    """
    form, products, lanes = x.matrix.records, x.matrix.dot, x.matrix.isa.lanes
    pairs = list(zip(x.rows[::2], x.rows[1::2], strict=True))
    totals = []
    for pair in pairs:
        corrections = [splat(form.correction(x.records, row, group, half), lanes) for row in pair]
        start = T.bind(shuffle(corrections, [0, 1, 4, 5]))
        totals.append([[register(start, lanes, "int32") for _ in range(2)] for _ in columns])
    count = QUADS // 2 // form.halves
    for number in range(half * count, (half + 1) * count):
        for pair, line in zip(pairs, totals, strict=True):
            activations = T.bind(form.pair(x.records, pair, group, number))
            for column, sums in zip(columns, line, strict=True):
                operands = column.operands[2 * number : 2 * number + 2]
                for (operand,), total in zip(operands, sums, strict=True):
                    total.set(products.pair_step(total.value, operand, activations))
    return [
        [shuffle([total.value for total in sums], order) for sums in line]
        for line in totals
        for order in ([0, 1, 4, 5], [2, 3, 6, 7])
    ]
