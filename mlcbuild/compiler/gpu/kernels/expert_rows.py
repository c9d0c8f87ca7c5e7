"""Emits GPU kernels for products of rows with the matrices of their chosen experts: matrix-vector products
(GEMVs) for few rows, and GEMMs on tiles of choices for prompts.

A choice is a pair (row, index among the row's choices), numbered row * chosen + index. A stack of matrices
may be bound in parts; a launch ignores choices of experts outside its part.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.expert_choice import Routes
from mlcbuild.compiler.gpu.kernels.norm_rows import NormVectors
from mlcbuild.compiler.gpu.kernels.normed_factors import Factors, RowBlock, RowsNorm
from mlcbuild.compiler.gpu.kernels.product import (
    GemvShape,
    Outputs,
    ProductBuffers,
    ProductSpec,
    finish,
)
from mlcbuild.compiler.gpu.kernels.storage import RowsOf, StoredMatrix
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
    the product if `spec` has them. It reads the experts' numbers from the Routes [n * chosen]; rows of y
    whose expert the launch does not bind stay unchanged."""
    with kernel(name) as k:
        shape = GemvShape.of(k, spec, 1)
        n, choices = k.size("n"), k.size("choices")
        x = RowsOf.declare(k, "x", n, spec.inputs)
        vectors = None if spec.norm is None else NormVectors.declare(k, spec.norm)
        buffers = ProductBuffers.declare(k, spec, experts.count, experts.total, choices)
        routes, first = Routes.declare(k, choices), k.scalar("first")
        with k.launch(shape.threads, shape.groups_of_outputs, "choices") as (bx, choice, tx):
            expert = bind(routes.expert(choice))
            matrix = bind(T.max(T.min(expert - first, experts.count - 1), 0))
            block = RowBlock(x, bind(choice // experts.chosen), 1, n)
            norm = None if vectors is None else RowsNorm.of(k, vectors, block, tx)
            outputs = shape.outputs(bx, tx)
            matrix_rows = [bind(matrix * shape.rows + row) for row in shape.matrix_rows(outputs)]
            sums = shape.sums(buffers.matrix, matrix_rows, Factors(block, norm, spec.inputs), tx)
            inside = T.And(expert >= first, expert < first + experts.count)
            target = Outputs(buffers, choice, 1, lambda _: inside, outputs, bind(expert * shape.rows))
            finish(k, [target], sums, norm, (shape.lanes, tx))
    return k


def expert_sum(
    name: str, spec: ProductSpec, experts: ExpertsSpec, shared: ProductSpec | None = None
) -> KernelBuilder:
    """Returns the kernel that multiplies rows with the matrices of their chosen experts and adds up the
    results: y[row] = the sum over i of weight_i * x[row * chosen + i] W_i^T, where W_i is the matrix of the
    row's i-th expert, whose bias is added to the product if `spec` has one. The sum is multiplied by the
    constant `spec.scale`, and added to y if `spec.residual` is True. x is float32 [n * chosen, inputs], y
    float32 [n, outputs]. The kernel reads the experts' numbers and weights from the Routes [n * chosen]; it
    leaves out experts whose matrices the launch does not bind, so of several launches for parts of a stack
    only the first may replace y.

    shared: description of the matrix, in the buffers w2 and s2, of a feed-forward that all tokens share. Its
    product with the rows of `gated` float32 [n, inputs of that matrix] is part of the sum. None: there is no
    such matrix.
    """
    with kernel(name) as k:
        shape = GemvShape.of(k, spec, 1)
        n, choices = k.size("n"), k.size("choices")
        x = RowsOf.declare(k, "x", choices, spec.inputs)
        buffers = ProductBuffers.declare(k, spec, experts.count, experts.total)
        routes, first = Routes.declare(k, choices), k.scalar("first")
        start = None if shared is None else _SharedProduct.declare(k, shared, shape.lanes)
        with k.launch(shape.threads, shape.groups_of_outputs, "n") as (bx, row, tx):
            outputs = shape.outputs(bx, tx)
            local_rows = shape.matrix_rows(outputs)
            if start is None:
                sums = local(shape.each)
                for index in range(shape.each):
                    put(sums, number(0), index)
            else:
                sums = start.sums(row, local_rows, tx)
            with T.serial(experts.chosen) as place:
                choice = bind(row * experts.chosen + place)
                expert, weight = bind(routes.expert(choice)), bind(routes.weight(choice))
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
                        put(sums, weight * value + sums[index], index)
            target = Outputs(buffers, row, 1, lambda row: row < n, outputs, None)
            finish(k, [target], sums, None, (shape.lanes, tx))
    return k


@dataclass(frozen=True)
class _SharedProduct:
    """The product with the output matrix of a feed-forward that all tokens share, in the kernel that adds up
    the outputs of chosen experts."""

    shape: GemvShape
    matrix: StoredMatrix
    gated: RowsOf
    n: Value

    @classmethod
    def declare(cls, k: KernelBuilder, spec: ProductSpec, lanes: int) -> _SharedProduct:
        """Declares the kernel's buffers of the matrix, w2 and s2, and of the rows `gated` that are multiplied
        with it. lanes: number of threads that share a row of each matrix in this kernel."""
        n = k.size("n")
        gated = RowsOf.declare(k, "gated", n, spec.inputs)
        with k.suffixed("2"):
            matrix = StoredMatrix.declare(k, spec.form, spec.outputs, spec.inputs)
        return cls(GemvShape.of(k, spec, 1, lanes), matrix, gated, n)

    def sums(self, row: Value, matrix_rows: list[Value], tx: Value) -> Value:
        """Emits the product of a row with rows of the matrix over the columns of one thread, and returns the
        sums, an array in registers with one number for each row of the matrix. row: index of the row in
        `gated`; matrix_rows: indices of the matrix's rows; tx: index of the thread."""
        block = RowBlock(self.gated, row, 1, self.n)
        return self.shape.sums(self.matrix, matrix_rows, Factors(block, None, self.gated.columns), tx)


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
