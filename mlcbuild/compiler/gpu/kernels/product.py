"""Emits GPU kernels that multiply few rows of x with a stored matrix (GEMV). The bits of a row of the result
do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlcbuild_format.program import PACKED_PRODUCTS
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Var

from mlcbuild.compiler.gpu.kernels import activations
from mlcbuild.compiler.gpu.kernels.activations import Gate, capped
from mlcbuild.compiler.gpu.kernels.norm_rows import NormSpec, NormVectors
from mlcbuild.compiler.gpu.kernels.normed_factors import AddedBuffers, Factors, RowBlock, RowsNorm
from mlcbuild.compiler.gpu.kernels.packed_product import packed_group_sums
from mlcbuild.compiler.gpu.kernels.storage import (
    CHUNK,
    RowsOf,
    StoredAs,
    StoredMatrix,
    Vector,
)
from mlcbuild.compiler.gpu.reductions import reduced
from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    Value,
    barrier,
    bind,
    exact,
    kernel,
    local,
    number,
    put,
    when,
)
from mlcbuild.models import Activation
from mlcbuild.quant.groups import GROUP


@dataclass(frozen=True)
class ProductSpec:
    """The product y = x W^T on a GPU, with the operations that are fused with it."""

    outputs: int
    """Number of columns of the result y of a matrix product that the kernel computes, from column `first` on.
    """
    inputs: int
    """Number of columns of x, the left factor of the matrix product."""
    form: StoredAs
    norm: NormSpec | None = None
    """The norm that is applied to the rows of x in a matrix product y = x W^T; None: x is not normalized."""
    added: NormSpec | None = None
    """The norm, an RMSNorm, of a second input `delta`: the matrix product reads x + added_scale * norm(delta)
    in place of x, and its kernel also writes these rows to the buffer `sum`. None: nothing is added to x.
    """
    added_scale: float = 1.0
    """Factor by which the normalized rows of a second input are multiplied before they are added to x, the
    left factor of a matrix product.
    """
    gate: Gate | None = None
    """The function that combines gate and up in a matrix product: W then has 2 * outputs rows, and y = gate(x
    times the first half of W, x times the second half). None: the product has no gate.
    """
    activation: Activation | None = None
    """The activation that is applied to the results of a matrix product; None: there is none. xIELU reads its
    parameters from the kernel's buffer `xielu`.
    """
    scale: float = 1.0
    """Factor by which the results of a matrix product are multiplied, after bias, gate and activation, and
    before the soft cap and their store in, or addition to, the output y.
    """
    row_gate: bool = False
    """True if each row of results of a matrix product is multiplied by sigmoid(row_gate[row]), where row_gate
    is a buffer of the kernel.
    """
    residual: bool = False
    """True if the results of a matrix product are added to the output y, False if they replace it."""
    half_bias: bool | None = None
    """True if the bias that is added to a matrix product's results is stored as float16, False if as float32;
    None: there is no bias.
    """
    half_scalars: bool = False
    """True if the parameters of the activation xIELU are stored as float16, False if as float32."""
    rounds_inputs: bool = False
    """True if a matrix product of few rows may round its left factor x to int8 with a scale for each group of
    32 columns, as the quantization scheme does on CPUs.
    """
    half_tiles: bool = False
    """True if a matrix product of many rows may round x and W to float16 before they are multiplied. Sums
    stay float32.
    """
    cap: float | None = None
    """The cap in y = cap * tanh(y / cap), which limits the results y of a matrix product; None: they are not
    limited.
    """
    stride: int = 0
    """Number of columns of the output tensor y of a matrix product, if its kernel writes only `outputs` of
    them; 0 if it writes all of them."""
    first: int = 0
    """Index of the first column of the output tensor y that the kernel of a matrix product writes."""

    @property
    def own_buffers(self) -> int:
        """Returns the number of buffers that a kernel binds for the output y of the product, for W with its
        scales, its bias and other numbers of its operations, without those for x and the norms of x."""
        others = (self.form.bits > 0, self.half_bias is not None, self.activation == "xielu", self.row_gate)
        return 2 + sum(others)


@dataclass(frozen=True)
class ProductBuffers:
    """The buffers of a matrix product's kernel (matrix, bias, result and others), and the operations on a sum
    before it is stored.
    """

    spec: ProductSpec
    matrix: StoredMatrix
    bias: Vector | None
    xielu: Vector | None
    row_gate: Value | None
    y: Value

    @classmethod
    def declare(
        cls,
        k: KernelBuilder,
        spec: ProductSpec,
        matrices: int = 1,
        biases: int = 1,
        results: Var | None = None,
    ) -> ProductBuffers:
        """Declares the buffers of a GPU kernel for a matrix product, y = x W^T, and returns them as a
        ProductBuffers: the matrix W, the output y and, where the product's `spec` has them, bias, parameters
        of xIELU and a factor for each row of y. matrices, biases: how many matrices W, and biases, their
        buffers hold; results: number of rows of y, if it is not the size `n`.
        """
        rows = spec.outputs * (2 if spec.gate else 1)
        matrix = StoredMatrix.declare(k, spec.form, matrices * rows, spec.inputs)
        count = biases * (spec.stride or rows)
        bias = None if spec.half_bias is None else Vector.declare(k, "bias", count, spec.half_bias)
        scalars = Vector.declare(k, "xielu", 4, spec.half_scalars) if spec.activation == "xielu" else None
        gate = k.buffer("row_gate", (k.size("n"), 1)) if spec.row_gate else None
        y = k.buffer("y", (k.size("n") if results is None else results, spec.stride or spec.outputs))
        return cls(spec, matrix, bias, scalars, gate, y)

    def store(self, row: Value, output: Value, sums: list[Value], bias: Value | int | None = 0) -> None:
        """Emits the last operations on one result of a matrix product y = x W^T (bias, gate, activation,
        factor of the row, scale, soft cap), and code that stores it in y[row, output + spec.first] or adds it
        to the value there.

        sums: the product of a row of x with a row of W and, if the product has a gate, that with the
        corresponding row in the second half of W. bias: index, in the buffer of biases, of the matrix's first
        bias; None: the sums already include their biases.
        """
        spec, values = self.spec, list(sums)
        column = output + spec.first
        if self.bias is not None and bias is not None:
            places = [bias + column + half * spec.outputs for half in range(len(values))]
            values = [value + self.bias[at] for value, at in zip(values, places, strict=True)]
        value = values[0]
        if spec.gate:
            value = activations.gated(spec.gate, bind(values[0]), bind(values[1]))
        if spec.activation is not None:
            value = activations.activated(spec.activation, value, self.xielu)
        if self.row_gate is not None:
            value = value * activations.sigmoid(self.row_gate[row, 0])
        if spec.scale != 1:
            value = value * exact(spec.scale)
        if spec.cap is not None:
            value = capped(value, spec.cap)
        put(self.y, self.y[row, column] + value if spec.residual else value, row, column)


@dataclass(frozen=True)
class GemvShape:
    """The division of a matrix-vector product (GEMV) among the threads of a workgroup. Some threads (lanes)
    share a row of W, and each reads 32 of its columns at a time.
    """

    spec: ProductSpec
    count: int
    """Number of rows of x that one workgroup multiplies with the matrix."""
    lanes: int
    """Number of lanes (threads) that share a row of W, a power of two up to 64."""
    is_packed: bool = False
    """True if x is rounded to int8 and multiplied with the codes of W four columns at a time."""

    threads = WORKGROUP

    @classmethod
    def of(cls, k: KernelBuilder, spec: ProductSpec, count: int, lanes: int = 0) -> GemvShape:
        """Returns the GemvShape of the product that `spec` describes, in the kernel `k`. count: number of
        rows of x per workgroup; lanes: number of threads that share a row of W, a power of two up to 64; 0:
        the number that `lanes_of` returns."""
        is_packed = spec.rounds_inputs and k.uses(PACKED_PRODUCTS)
        return cls(spec, count, lanes or lanes_of(spec), is_packed)

    @property
    def rows(self) -> int:
        """Returns the number of rows of one weight matrix W: `outputs`, or twice as many with a gate."""
        return self.spec.outputs * (2 if self.spec.gate else 1)

    @property
    def groups(self) -> int:
        """Returns the number of groups of 32 columns in the weight matrix W; the last may be incomplete."""
        return -(-self.spec.inputs // GROUP)

    @property
    def each(self) -> int:
        """Returns the number of columns of the result that one GPU thread computes in a matrix-vector
        product: 2 with a gate or for more than two rows of x, else 4. With several columns, several loads of
        weights are in flight, which hides the latency of memory; the sums of more columns would not fit into
        registers."""
        return 2 if self.count > 2 or self.spec.gate else 4

    @property
    def groups_of_outputs(self) -> int:
        return -(-self.spec.outputs // (WORKGROUP // self.lanes * self.each))

    def outputs(self, block: Value, tx: Value) -> list[Value]:
        """Returns a list with the indices of the `each` (2 or 4) columns of the product that one GPU thread
        computes, as int32 expressions; they may lie beyond the last column. block: index of the workgroup;
        tx: index of the thread in it.
        """
        in_group = WORKGROUP // self.lanes
        first = block * (in_group * self.each) + tx // self.lanes
        return [bind(first + index * in_group) for index in range(self.each)]

    def matrix_rows(self, outputs: list[Value]) -> list[Value]:
        """Returns a list of the indices, int32 expressions, of the rows of W that a thread multiplies for its
        columns of the result: one row each or, if W holds gates in its first half and ups in its second,
        first the rows of gates, then those of ups. outputs: indices of these columns; one beyond the last
        gets the last row.
        """
        bounded = [bind(T.min(output, self.spec.outputs - 1)) for output in outputs]
        halves = 2 if self.spec.gate else 1
        return [row + half * self.spec.outputs for half in range(halves) for row in bounded]

    def sums(self, matrix: StoredMatrix, rows: list[Value], factors: Factors, tx: Value) -> Value:
        """Emits the products of rows of x with rows of W over the columns of one thread, which shares rows of
        W with others, and returns their sums, an array in registers [row of x, row of W]. rows: indices of
        the rows of W; factors: the object whose methods emit reads of x; tx: index of the thread.
        """
        count = len(rows) * factors.block.count
        sums: Value = local(count)
        part: Value = None if self.is_packed else local(count)
        with T.serial(count) as index:
            put(sums, number(0), index)
        with T.serial(-(-self.groups // self.lanes)) as step:
            group = bind(step * self.lanes + tx % self.lanes)
            with when(group < self.groups):
                if self.is_packed:
                    packed_group_sums(matrix, rows, group, sums, factors)
                else:
                    _group_sums(matrix, rows, group, (part, sums), factors)
        return sums


def lanes_of(spec: ProductSpec) -> int:
    """Returns the number of threads (lanes) of a workgroup that share a row of W in a matrix-vector product:
    the largest power of two up to 64 and up to the number of groups of 32 columns that W has."""
    return min(WORKGROUP, 1 << ((-(-spec.inputs // GROUP)).bit_length() - 1))


def gemv(name: str, spec: ProductSpec, rows: int) -> KernelBuilder:
    """Returns the kernel y = x W^T for few rows of x, with the operations that `spec` fuses with the product.
    W is stored in the format `spec.form`; a workgroup multiplies up to `rows` rows of x."""
    with kernel(name) as k:
        shape, n = GemvShape.of(k, spec, rows), k.size("n")
        x = RowsOf.declare(k, "x", n, spec.inputs)
        vectors = None if spec.norm is None else NormVectors.declare(k, spec.norm)
        added = None if spec.added is None else AddedBuffers.declare(k, spec.added, spec.added_scale, n)
        buffers = ProductBuffers.declare(k, spec)
        with k.launch(WORKGROUP, shape.groups_of_outputs, ("div", "n", rows)) as (bx, by, tx):
            block = RowBlock(x, bind(by * rows), rows, n)
            if added is not None:
                block = added.to(k, block, (bx, tx))
            norm = None if vectors is None else RowsNorm.of(k, vectors, block, tx)
            outputs = shape.outputs(bx, tx)
            factors = Factors(block, norm, spec.inputs)
            sums = shape.sums(buffers.matrix, shape.matrix_rows(outputs), factors, tx)
            target = Outputs(buffers, block.first, rows, lambda row: row < n, outputs, 0)
            finish(k, [target], sums, norm, (shape.lanes, tx))
    return k


def _group_sums(
    matrix: StoredMatrix, matrix_rows: list[Value], group: Value, out: tuple[Value, Value], factors: Factors
) -> None:
    """Emits code that multiplies rows of x with rows of W in one group of 32 columns, and adds the products
    to the sums so far, an array in registers [row of x, row of W]. matrix_rows: indices of the rows of W;
    group: index of the group; out: (array of the same size for intermediate results, array of sums); factors:
    the object whose methods emit reads of x."""
    part, sums = out
    count, width, runs = factors.block.count, len(matrix_rows), matrix.runs
    words = [matrix.group(row, group) for row in matrix_rows]
    scales = [matrix.scales(row, group) for row in matrix_rows]
    # A minimum is multiplied by the sum of the x of its run, which all rows of W share.
    totals: Value = local(count) if matrix.form.minimum else None
    for run in range(runs):
        _clear(part, count * width)
        if totals is not None:
            _clear(totals, count)
        for index in range(run * (GROUP // CHUNK) // runs, (run + 1) * (GROUP // CHUNK) // runs):
            column = bind(group * (GROUP // CHUNK) + index)
            norm = factors.of_norm(column)
            codes = [
                [bind(code) for code in matrix.chunk(words[place], row, group, index)]
                for place, row in enumerate(matrix_rows)
            ]
            with T.serial(count) as x_row:
                values = factors.chunk(x_row, column, norm)
                for place in range(width):
                    total = part[x_row * width + place]
                    for code, value in zip(codes[place], values, strict=True):
                        total = code * value + total
                    put(part, total, x_row * width + place)
                if totals is not None:
                    put(totals, totals[x_row] + (values[0] + values[1] + values[2] + values[3]), x_row)
        with T.serial(count) as x_row:
            for place, of_row in enumerate(scales):
                at = x_row * width + place
                value = part[at]
                if of_row:
                    scale, minimum = of_row[run]
                    value = value * scale
                    value = value if minimum is None else value + totals[x_row] * minimum
                put(sums, sums[at] + value, at)


def _clear(array: Value, count: int) -> None:
    with T.serial(count) as index:
        put(array, number(0), index)


@dataclass(frozen=True)
class Outputs:
    """The elements of a matrix product's output y that a thread stores: `count` rows from row `first` on, and
    the columns in `outputs`, all as expressions of the kernel.
    """

    buffers: ProductBuffers
    first: Value
    """Index of the first row of the output y that the workgroup stores, an expression of the kernel."""
    count: int
    inside: Callable[[Value], Value]
    """Function from the index of a row of y to the condition, an expression of the kernel, under which the
    row is stored.
    """
    outputs: list[Value]
    bias: Value | int | None
    """Index, in the buffer of biases, of the bias that belongs to the matrix's first row; None: the sums
    already include their biases.
    """

    @property
    def width(self) -> int:
        """Returns the number of rows of W that a thread multiplies, two for each column of y with a gate."""
        return len(self.outputs) * (2 if self.buffers.spec.gate else 1)

    def store(self, row: Value, totals: list[Value], condition: Value) -> None:
        """Emits the store of one row's results. row: index of the row of y; totals: sums of the product for
        the rows of W that the thread multiplies; condition: whether the thread stores results of this row."""
        each = len(self.outputs)
        for place, output in enumerate(self.outputs):
            with when(T.And(condition, output < self.buffers.spec.outputs)):
                self.buffers.store(row, output, totals[place : self.width : each], self.bias)


def finish(
    k: KernelBuilder, targets: Sequence[Outputs], sums: Value, norm: RowsNorm | None, at: tuple[int, Value]
) -> None:
    """Emits code that ends a matrix-vector product y = x W^T: it adds up the partial sums of the threads that
    share a row of W, applies the operations fused with the product (bias, gate, activation, row factor,
    scale, cap), and stores the results in y or adds them to it.

    targets: rows and columns of y that are stored; several in a kernel of several products, of which each
    workgroup computes one; sums: partial sums of the running thread, an array in registers [row of x, row of
    W]; norm: the norm of x, whose factor the sums still lack if it is an RMSNorm, or None; at: (number of
    threads that share a row of W, index of the thread)."""
    (lanes, tx), first, width = at, targets[0], max(target.width for target in targets)
    scratch = [k.shared(WORKGROUP) for _ in range(width)]
    with T.serial(first.count) as index:
        values = [sums[index * width + place] for place in range(width)]
        values = values if norm is None else [norm.after(value, index) for value in values]
        totals, row = reduced(k, values, scratch, (tx, lanes), "add"), bind(first.first + index)
        for target in targets:
            target.store(row, totals, T.And(tx % lanes == 0, target.inside(row)))
        barrier()


def rows_per_workgroup(largest: int) -> list[int]:
    """Returns the numbers of rows of x per workgroup, in ascending order, for which separate kernels of
    matrix-vector products (GEMVs) are built: 1, 2, 4 and 8, up to the first that is at least `largest`, the
    maximum number of rows in a call; all four if `largest` is more than 8."""
    return [rows for rows in (1, 2, 4, 8) if rows == 1 or rows < 2 * largest]
