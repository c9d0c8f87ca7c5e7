"""Emits reads of rows of x, the left factor of a matrix product on a GPU, and their norm while they
are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Var

from mlcbuild.compiler.gpu.kernels.norm_rows import NormSpec, NormVectors, inverse_root
from mlcbuild.compiler.gpu.kernels.storage import CHUNK, RowsOf
from mlcbuild.compiler.gpu.reductions import reduced
from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    Value,
    barrier,
    bind,
    exact,
    local,
    number,
    put,
    when,
)
from mlcbuild.quant.groups import GROUP


@dataclass(frozen=True)
class RowBlock:
    """A block of `count` rows of x, from row `first` on, that one workgroup multiplies. Loops over these rows
    stay loops in the kernel; drivers unroll them.
    """

    x: RowsOf
    first: Value
    count: int
    n: Value
    added: AddedRows | None = None
    """Rows of another tensor that are normalized and added to the rows of x while a kernel reads them; None:
    nothing is added.
    """

    def place(self, index: Value) -> Value:
        """Returns the index, in x, of row `index` of the block of rows that a workgroup multiplies. Positions
        beyond the last row of x give the last row.
        """
        return bind(T.min(self.first + index, self.n - 1))

    def chunk(self, index: Value, column: Value) -> list[Value]:
        """Returns the four float32 values in columns 4 * column to 4 * column + 3 of a row of x, plus the
        normalized row that is added to it if there is one; values beyond the end of the row are 0, up to the
        next multiple of 32 columns. index: position of the row in the workgroup's block.
        """
        place = self.place(index)
        values = self.x.chunk(place, column)
        return values if self.added is None else self.added.to(values, index, place, column)


@dataclass(frozen=True)
class AddedRows:
    """Rows of a tensor float32 [n, columns] whose RMS norm, times the constant `scale`, a kernel adds to the
    rows of x, the left factor of a matrix product, while it reads them.
    """

    rows: RowsOf
    vectors: NormVectors
    roots: Value
    """Array in registers, for each row of x that the workgroup multiplies: 1 / root of (mean square + the
    norm's epsilon) of that row of the tensor whose norm the kernel adds to x."""
    scale: float

    def to(self, values: list[Value], index: Value, place: Value, column: Value) -> list[Value]:
        """Returns four values of a row of x, each plus the constant `scale` times the RMS norm, with weights
        if it has any, of the same row and column of another tensor. values: the four of x; index: position of
        the row among the rows that the workgroup multiplies; place: index of the row in both tensors; column:
        index of the four columns, 4 * column to 4 * column + 3.
        """
        sums, last = [], self.rows.columns - 1
        for offset, (value, added) in enumerate(zip(values, self.rows.chunk(place, column), strict=True)):
            factor = self.vectors.factor(bind(T.min(column * CHUNK + offset, last)))
            normed = added * self.roots[index]
            normed = normed if factor is None else normed * factor
            sums.append(bind(value + (normed if self.scale == 1 else normed * exact(self.scale))))
        return sums


@dataclass(frozen=True)
class AddedBuffers:
    """The buffers of a matrix product's kernel that first replaces its input x by x + scale * norm(delta),
    with an RMS norm: the rows `delta`, the weight of the norm, and `sum`, into which the kernel also writes
    the new x.
    """

    delta: RowsOf
    sums: Value
    vectors: NormVectors
    scale: float

    @classmethod
    def declare(cls, k: KernelBuilder, norm: NormSpec, scale: float, n: Var) -> AddedBuffers:
        delta, sums = RowsOf.declare(k, "delta", n, norm.columns), k.buffer("sum", (n, norm.columns))
        vectors = NormVectors.declare(k, norm, ("post_weight", "post_shift"))
        return cls(delta, sums, vectors, scale)

    def to(self, k: KernelBuilder, block: RowBlock, at: tuple[Value, Value]) -> RowBlock:
        """Emits code that computes 1 / root of (mean square + epsilon) of the rows of the buffer `delta`, for
        the rows of x that a workgroup multiplies. Returns `block`, the object that reads these rows, changed
        to read x + scale * norm(delta); the first workgroup also stores these sums in the buffer `sum`. at:
        (index of the workgroup among those of the same rows, index of the thread).
        """
        (bx, tx), columns = at, self.delta.columns
        norm = RowsNorm.of(k, self.vectors, replace(block, x=self.delta), tx)
        block = replace(block, added=AddedRows(self.delta, self.vectors, norm.roots, self.scale))
        chunks = -(-columns // CHUNK)
        with when(bx == 0), T.serial(block.count) as index, T.serial(-(-chunks // WORKGROUP)) as step:
            column = bind(step * WORKGROUP + tx)
            with when(T.And(column < chunks, block.first + index < block.n)):
                for place, value in enumerate(block.chunk(index, column)):
                    with when(column * CHUNK + place < columns):
                        put(self.sums, value, block.first + index, column * CHUNK + place)
        return block


@dataclass(frozen=True)
class RowsNorm:
    """The norm of the rows that a workgroup multiplies, whose statistics it has computed. For RMSNorm, the
    finished sums of a product are multiplied by 1 / root of (mean square + epsilon) of their row. A norm that
    subtracts the mean, or adds a bias, is applied before the product.
    """

    vectors: NormVectors
    roots: Value
    """Array in registers, for each row of x in the workgroup's block of rows: 1 / root of (mean square + the
    norm's epsilon); for LayerNorm, of the row minus its mean.
    """
    means: Value | None

    @classmethod
    def of(cls, k: KernelBuilder, vectors: NormVectors, block: RowBlock, tx: Value) -> RowsNorm:
        """Emits code that computes 1 / root of (mean square + epsilon), and for LayerNorm the mean, which is
        subtracted first, of each row of `block`, the rows of x that a workgroup multiplies, and returns them
        as a RowsNorm. tx: index of the thread.
        """
        spec = vectors.spec
        roots, means = local(block.count), local(block.count) if spec.is_centred else None
        partial, sums, chunks = local(1), k.shared(WORKGROUP), -(-spec.columns // CHUNK)

        def total(row: Value, term: Callable[[Value, Value], Value]) -> Value:
            put(partial, number(0), 0)
            with T.serial(-(-chunks // WORKGROUP)) as step:
                column = bind(step * WORKGROUP + tx)
                with when(column < chunks):
                    for index, value in enumerate(block.chunk(row, column)):
                        put(partial, term(value, column * CHUNK + index) + partial[0], 0)
            (result,) = reduced(k, [partial[0]], [sums], (tx, WORKGROUP), "add")
            barrier()
            return result

        with T.serial(block.count) as index:
            if means is None:
                squares = total(index, lambda value, _: value * value)
            else:
                mean = bind(total(index, lambda value, _: value) * exact(1 / spec.columns))
                put(means, mean, index)
                squares = total(index, lambda value, at: _square(value - mean, at, spec.columns))
            put(roots, inverse_root(squares, exact(1 / spec.columns), spec.norm.eps), index)
        return cls(vectors, roots, means)

    def after(self, value: Value, index: Value) -> Value:
        """Returns `value`, a sum of a matrix product, multiplied by the factor in `roots` of the row with
        this index in the block, unless the norm was applied before the product."""
        return value if self.vectors.spec.is_centred else value * self.roots[index]


def _square(value: Value, column: Value, columns: int) -> Value:
    """Returns an expression for the square of a value of a row, or 0 if `column`, the value's column, is not
    below `columns`, the number of columns of the row."""
    value = bind(value)
    if columns % CHUNK == 0:
        return value * value
    return T.Select(column < columns, value * value, number(0))


@dataclass(frozen=True)
class Factors:
    """Emits reads of normalized rows of x for a matrix product. With RMSNorm they lack the factor 1 / root
    mean square of the row, by which the finished sums are multiplied instead.
    """

    block: RowBlock
    norm: RowsNorm | None
    columns: int

    def of_norm(self, column: Value) -> list[tuple[Value | None, Value | None]] | None:
        """Returns the parameters of the norm of x for the columns 4 * column to 4 * column + 3, as a list of
        four pairs (weight plus the norm's offset, bias); None takes the place of a parameter that the norm
        lacks. The result is None instead of a list if x is not normalized."""
        if self.norm is None:
            return None
        at = [column * CHUNK + index for index in range(CHUNK)]
        if self.columns % GROUP:
            at = [T.min(index, self.columns - 1) for index in at]
        pairs, vectors = [], self.norm.vectors
        for place in at:
            index = bind(place)
            factor = vectors.factor(index)
            shift = None if vectors.bias is None else bind(vectors.bias[index])
            pairs.append((None if factor is None else bind(factor), shift))
        return pairs

    def chunk(
        self, row: Value, column: Value, norm: list[tuple[Value | None, Value | None]] | None
    ) -> list[Value]:
        """Emits reads of four float32 values of a row of x, the left factor of a matrix product, with the
        weights and biases of a norm applied, and returns them. The values are in the columns 4 * column to 4
        * column + 3.

        LayerNorm is applied completely. With RMSNorm the factor 1 / root mean square of the row is still
        missing: the product's finished sums are multiplied by it. row: position of the row among the rows
        that the workgroup multiplies; norm: (weight, bias) for each of the four columns, None for one that
        the norm lacks; None instead of the list: no norm.
        """
        values = self.block.chunk(row, column)
        if norm is None or self.norm is None:
            return values
        if self.norm.means is not None:
            values = [(value - self.norm.means[row]) * self.norm.roots[row] for value in values]
        values = [v if f is None else v * f for v, (f, _) in zip(values, norm, strict=True)]
        values = [bind(v if shift is None else v + shift) for v, (_, shift) in zip(values, norm, strict=True)]
        if self.columns % GROUP == 0 or self.norm.means is None:
            return values
        # Beyond its columns a matrix holds arbitrary numbers. x is 0 there, but x minus its mean is not.
        is_inside_row = [column * CHUNK + index < self.columns for index in range(CHUNK)]
        return [
            bind(T.Select(is_inside, v, number(0)))
            for is_inside, v in zip(is_inside_row, values, strict=True)
        ]
