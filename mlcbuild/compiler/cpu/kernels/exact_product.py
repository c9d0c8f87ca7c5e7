"""Emits the product x @ W.T with a small unquantized matrix, such as a router of experts, so that the bits of
a result depend only on its own row of x: a choice among experts may be decided by the last bit.

Rows of x are multiplied one at a time, all by the same instructions. With blocks of rows, as in
`float_product`, prompts were faster, but a second body would have to be compiled: the router took as long to
compile as a matrix of quantized weights.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.kernels.float_product import FloatCall, RowFormat, product_kernel, stream_tile
from mlcbuild.compiler.cpu.kernels.floats import over_rows
from mlcbuild.compiler.cpu.kernels.prologue import SERIAL_BYTES, SERIAL_ROWS, Fusion
from mlcbuild.compiler.cpu.kernels.vectors import i64


def exact_product(form: RowFormat, fusion: Fusion) -> PrimFunc:
    """Returns the kernel (tensors from which x [m, k] is computed, stored weights W [n, k], out float32
    [m, n]) of x @ W.T. No bit of a row of `out` depends on the other rows or on their number m.
    """
    small = form.n * form.row_bytes < SERIAL_BYTES
    name = fusion.named(f"{form.name}_{form.n}x{form.k}_exact")
    return product_kernel(form, fusion, name, _row_by_row if small else _column_by_column)


def _row_by_row(call: FloatCall, lines: Buffer) -> None:
    """Emits the product with rows of x divided among the cores, each of which reads the whole matrix; up to 4
    rows are computed by one core. For a matrix that one core reads faster than another core wakes, so that
    dividing the matrix would take longer."""

    def one_row(row: Expr) -> None:
        with T.serial(0, _tiles(call.form)) as tile:
            stream_tile(call, lines, tile, [row])

    over_rows(call.m, SERIAL_ROWS, one_row)


def _column_by_column(call: FloatCall, lines: Buffer) -> None:
    """Emits the product with weight rows, which are columns of the result, divided among the cores. They stay
    in L1 while all rows of x are multiplied with them.
    """
    with T.parallel(0, _tiles(call.form)) as tile, T.serial(0, call.m) as row:
        stream_tile(call, lines, tile, [row])


def _tiles(form: RowFormat) -> Expr:
    return i64(-(-form.n // form.isa.stream_rows))
