"""Emits the GPU kernel of two products of the same few rows, each with a matrix of its own."""

from __future__ import annotations

from mlcbuild_format.program import GUARANTEED
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.norm_rows import NormVectors
from mlcbuild.compiler.gpu.kernels.normed_factors import Factors, RowBlock, RowsNorm
from mlcbuild.compiler.gpu.kernels.product import GemvShape, Outputs, ProductBuffers, ProductSpec, finish
from mlcbuild.compiler.gpu.kernels.storage import RowsOf
from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    Value,
    bind,
    kernel,
    local,
    number,
    put,
    when,
)


def can_pair(first: ProductSpec, second: ProductSpec) -> bool:
    """Returns True if one kernel can compute both products of the same rows x, that is, if it binds no more
    buffers than every device can. The products must have the same norm of x.
    """
    bound = 1 + first.own_buffers + second.own_buffers + (0 if first.norm is None else first.norm.buffers)
    return bound <= GUARANTEED.storage_buffers


def gemv_pair(name: str, first: ProductSpec, second: ProductSpec, rows: int) -> KernelBuilder:
    """Returns the kernel of two products of the same few rows, y = x W^T and y2 = x W2^T, where x is
    normalized if both `first` and `second`, their descriptions, have the same norm; other operations are
    fused with each product for itself, except sums that are added to x. The buffers of the second product
    have the suffix 2. A workgroup multiplies up to `rows` rows of x with some columns of one of the matrices.
    """
    with kernel(name) as k:
        n = k.size("n")
        x = RowsOf.declare(k, "x", n, first.inputs)
        vectors = None if first.norm is None else NormVectors.declare(k, first.norm)
        buffers = [ProductBuffers.declare(k, first)]
        with k.suffixed("2"):
            buffers.append(ProductBuffers.declare(k, second))
        shapes = [GemvShape.of(k, spec, rows) for spec in (first, second)]
        middle, end = shapes[0].groups_of_outputs, sum(shape.groups_of_outputs for shape in shapes)
        with k.launch(WORKGROUP, end, ("div", "n", rows)) as (bx, by, tx):
            block = RowBlock(x, bind(by * rows), rows, n)
            norm = None if vectors is None else RowsNorm.of(k, vectors, block, tx)
            conditions, places = (bx < middle, bx >= middle), (bx, bx - middle)
            targets = [
                _outputs(operands, shape.outputs(place, tx), block, condition)
                for operands, shape, place, condition in zip(buffers, shapes, places, conditions, strict=True)
            ]
            factors, width = Factors(block, norm, first.inputs), max(target.width for target in targets)
            # Only the sums in registers depend on the product: both have the same barriers.
            sums = local(rows * width)
            for shape, target, condition in zip(shapes, targets, conditions, strict=True):
                with when(condition):
                    matrix_rows = shape.matrix_rows(target.outputs)
                    products = shape.sums(target.buffers.matrix, matrix_rows, factors, tx)
                    _copy(products, target.width, sums, width, rows)
            finish(k, targets, sums, norm, (shapes[0].lanes, tx))
    return k


def _outputs(buffers: ProductBuffers, outputs: list[Value], block: RowBlock, condition: Value) -> Outputs:
    """Returns the elements of one product's result that a thread stores. outputs: indices of its columns;
    block: the rows that the workgroup multiplies; condition: whether it does so for this product.
    """
    return Outputs(buffers, block.first, block.count, lambda row: T.And(condition, row < block.n), outputs, 0)


def _copy(products: Value, count: int, sums: Value, width: int, rows: int) -> None:
    """Emits a copy of rows of an array in registers, `count` numbers each, to rows of the array `sums`, which
    have `width` numbers, with 0 in place of those that are missing. rows: number of rows."""
    with T.serial(rows) as row:
        for column in range(width):
            value = products[row * count + column] if column < count else number(0)
            put(sums, value, row * width + column)
