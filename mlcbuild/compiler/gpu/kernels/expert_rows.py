"""Emits GPU kernels for products of rows with the matrices of their chosen experts: matrix-vector products
(GEMVs) for few rows, and GEMMs on tiles of choices for prompts.

A choice is a pair (row, index among the row's choices), numbered row * chosen + index. A stack of matrices
may be bound in parts; a launch ignores choices of experts outside its part.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.norm_rows import NormVectors
from mlcbuild.compiler.gpu.kernels.normed_factors import Factors, RowBlock, RowsNorm
from mlcbuild.compiler.gpu.kernels.product import (
    GemvShape,
    Outputs,
    ProductBuffers,
    ProductSpec,
    finish,
)
from mlcbuild.compiler.gpu.kernels.storage import RowsOf
from mlcbuild.compiler.gpu.kernels.tile_product import THREADS, TILE, TileRows, multiply_tile
from mlcbuild.compiler.gpu.tensorir import KernelBuilder, Value, bind, kernel, local, number, put, when


@dataclass(frozen=True)
class ExpertsSpec:
    """The experts whose matrices one launch of a product binds. The scalar `first` of the kernels is the
    number of the first one.
    """

    total: int
    count: int
    """Number of experts whose matrices the launch binds."""
    chosen: int


def expert_gemv(name: str, spec: ProductSpec, experts: ExpertsSpec) -> KernelBuilder:
    """Returns the kernel y[row * chosen + i] = x[row] W^T for few rows of x float32 [n, inputs], with the
    matrix W of the row's i-th expert; y is float32 [n * chosen, outputs]. Norm, bias and gate are fused with
    the product if `spec` has them. It reads the experts' numbers from `routes` int32 [n * chosen]; rows of y
    whose expert the launch does not bind stay unchanged."""
    with kernel(name) as k:
        shape = GemvShape.of(k, spec, 1)
        n, choices = k.size("n"), k.size("choices")
        x = RowsOf.declare(k, "x", n, spec.inputs)
        vectors = None if spec.norm is None else NormVectors.declare(k, spec.norm)
        buffers = ProductBuffers.declare(k, spec, experts.count, experts.total, choices)
        routes, first = k.buffer("routes", (choices,), "int32"), k.scalar("first")
        with k.launch(shape.threads, shape.groups_of_outputs, "choices") as (bx, choice, tx):
            expert = bind(routes[choice])
            matrix = bind(T.max(T.min(expert - first, experts.count - 1), 0))
            block = RowBlock(x, bind(choice // experts.chosen), 1, n)
            norm = None if vectors is None else RowsNorm.of(k, vectors, block, tx)
            outputs = shape.outputs(bx, tx)
            matrix_rows = [bind(matrix * shape.rows + row) for row in shape.matrix_rows(outputs)]
            sums = shape.sums(buffers.matrix, matrix_rows, Factors(block, norm, spec.inputs), tx)
            inside = T.And(expert >= first, expert < first + experts.count)
            target = Outputs(choice, 1, inside, outputs, bind(expert * shape.rows))
            finish(k, buffers, sums, norm, target, (shape, tx))
    return k


def expert_sum(name: str, spec: ProductSpec, experts: ExpertsSpec) -> KernelBuilder:
    """Returns the kernel that multiplies rows with the matrices of their chosen experts and adds up the
    results: y[row] = the sum over i of weight_i * x[row * chosen + i] W_i^T, where W_i is the matrix of the
    row's i-th expert, whose bias is added to the product if `spec` has one. The sum is multiplied by the
    constant `spec.scale`, and added to y if `spec.residual` is True. x is float32 [n * chosen, inputs], y
    float32 [n, outputs]. The kernel reads the experts' numbers from `routes` int32 [n * chosen], and their
    weights from `shares` float32 [n * chosen]; it leaves out experts whose matrices the launch does not bind,
    so of several launches for parts of a stack only the first may replace y.
    """
    with kernel(name) as k:
        shape = GemvShape.of(k, spec, 1)
        n, choices = k.size("n"), k.size("choices")
        x = RowsOf.declare(k, "x", choices, spec.inputs)
        buffers = ProductBuffers.declare(k, spec, experts.count, experts.total)
        routes, shares = k.buffer("routes", (choices,), "int32"), k.buffer("shares", (choices,))
        first = k.scalar("first")
        with k.launch(shape.threads, shape.groups_of_outputs, "n") as (bx, row, tx):
            outputs = shape.outputs(bx, tx)
            local_rows, count = shape.matrix_rows(outputs), shape.each
            sums = local(count)
            for index in range(count):
                put(sums, number(0), index)
            with T.serial(experts.chosen) as place:
                choice = bind(row * experts.chosen + place)
                expert, share = bind(routes[choice]), bind(shares[choice])
                with when(T.And(expert >= first, expert < first + experts.count)):
                    matrix_rows = [bind((expert - first) * shape.rows + at) for at in local_rows]
                    factors = Factors(RowBlock(x, choice, 1, choices), None, spec.inputs)
                    products = shape.sums(buffers.matrix, matrix_rows, factors, tx)
                    for index, output in enumerate(outputs):
                        value = products[index]
                        if buffers.bias is not None:  # Only one lane adds it.
                            at = bind(expert * shape.rows + T.min(output, spec.outputs - 1))
                            bias = buffers.bias[at]
                            value = value + T.Select(tx % shape.lanes == 0, bias, number(0))
                        put(sums, share * value + sums[index], index)
            target = Outputs(row, 1, row < n, outputs, None)
            finish(k, buffers, sums, None, target, (shape, tx))
    return k


def expert_gemm(name: str, spec: ProductSpec, experts: ExpertsSpec, per_row: int) -> KernelBuilder:
    """Returns the kernel y[choice] = x[choice // per_row] W^T for many rows, where a choice numbers a pair
    (row, chosen expert) and W is the expert's matrix; a bias is added if `spec` has one. It computes tiles of
    choices of one expert: `order` int32 [choices] holds the choices sorted by expert, and `tiles` int32
    [tiles, 3] expert, first index in `order` and number of choices. Rows of y whose expert the launch does
    not bind stay unchanged. per_row: number of choices that share a row of x."""
    with kernel(name) as k:
        n, choices, count = k.size("n"), k.size("choices"), k.size("tile_count")
        x = k.buffer("x", (n, spec.inputs))
        buffers = ProductBuffers.declare(k, spec, experts.count, experts.total, choices)
        order, tiles = k.buffer("order", (choices,), "int32"), k.buffer("tiles", (count, 3), "int32")
        first = k.scalar("first")
        with k.launch(THREADS, -(-spec.outputs // TILE), "tile_count") as (bx, by, tx):
            expert, start, used = (bind(tiles[by, index]) for index in range(3))
            matrix = bind(T.max(T.min(expert - first, experts.count - 1), 0))
            inside = bind(T.And(expert >= first, expert < first + experts.count))

            def choice(line: Value) -> Value:
                place = start + T.min(line, T.max(used - 1, 0))
                return bind(order[T.max(T.min(place, choices - 1), 0)])

            rows = TileRows(
                choice,
                lambda line: T.And(inside, line < used),
                lambda line, column: x[bind(choice(line) // per_row), column],
                bind(matrix * spec.outputs),
                bind(expert * spec.outputs),
            )
            multiply_tile(k, buffers, rows, (bx, tx))
    return k
