"""Emits GPU kernels that multiply many rows with a stored matrix: a GEMM on tiles. The bits of a row do not
depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mlcbuild_format.program import SHADER_F16
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.product import ProductBuffers, ProductSpec
from mlcbuild.compiler.gpu.kernels.storage import CHUNK, StoredMatrix
from mlcbuild.compiler.gpu.tensorir import (
    KernelBuilder,
    Value,
    barrier,
    bind,
    floating,
    kernel,
    local,
    number,
    put,
    when,
)

TILE, DEPTH = 64, 32
"""Sizes in the kernel of a matrix product of many rows. TILE: number of rows, and also of columns, in a tile
of results. DEPTH: number of columns of both factors that are read at a time. Parts of both factors take 16 KB
of shared memory together, or half as much as float16."""
_LARGEST_HALF = 65504
_SIDE = 4
"""Number of rows and of columns of the square of results that one thread computes."""
_ACROSS = TILE // _SIDE
THREADS = _ACROSS * _ACROSS


def gemm(name: str, spec: ProductSpec) -> KernelBuilder:
    """Returns the kernel y = x W^T for many rows x float32 [n, inputs], with the operations that `spec` fuses
    with the product, which must not be a norm or a gate.
    """
    with kernel(name) as k:
        n = k.size("n")
        x = k.buffer("x", (n, spec.inputs))
        buffers = ProductBuffers.declare(k, spec)
        with k.launch(THREADS, -(-spec.outputs // TILE), ("div", "n", TILE)) as (bx, by, tx):
            first = bind(by * TILE)

            def row(line: Value) -> Value:
                return bind(first + line)

            def read(line: Value, column: Value) -> Value:
                return x[bind(T.min(first + line, n - 1)), column]

            tile = TileRows(row, lambda line: first + line < n, read)
            multiply_tile(k, buffers, tile, (bx, tx))
    return k


@dataclass(frozen=True)
class TileRows:
    """The 64 rows of x and of the result y = x W^T that one workgroup computes as a tile. Functions map a
    *line*, the position 0 to 63 of a row in the tile, to the row's index in y, to the condition for its
    store, and to its values in x.
    """

    row: Callable[[Value], Value]
    """Function that maps the position of a row in the tile, 0 to 63, to the index of its row of the result y.
    """
    inside: Callable[[Value], Value]
    """Function that maps the position of a row in the tile, 0 to 63, to the condition, an expression of the
    kernel, under which its results are stored.
    """
    read: Callable[[Value, Value], Value]
    """Function of (position of a row in the tile, 0 to 63; column of x, counted from the start of the row)
    that returns one float32 value of the left factor x."""
    matrix: Value | int = 0
    """Index, in the tensors that hold several matrices one after the other, of the first row of the matrix
    that is multiplied.
    """
    bias: Value | int = 0
    """Index, in the buffer of all biases, of the first bias of the matrix that is multiplied."""


def multiply_tile(k: KernelBuilder, buffers: ProductBuffers, tile: TileRows, at: tuple[Value, Value]) -> None:
    """Emits code that multiplies 64 rows of x with 64 rows of a matrix, and stores the results. buffers: the
    matrix, the output, and the operations that follow the product; tile: the rows of x and of the output; at:
    (index of the 64 rows of the matrix, in units of 64; index of the thread)."""
    (bx, tx), spec = at, buffers.spec
    form = "float16" if spec.half_tiles and k.uses(SHADER_F16) else "float32"
    left, right, sums = k.shared(DEPTH * TILE, form), k.shared(DEPTH * TILE, form), local(_SIDE * _SIDE)
    for index in range(_SIDE * _SIDE):
        put(sums, number(0), index)
    with T.serial(-(-spec.inputs // DEPTH)) as step:
        for index in range(DEPTH * TILE // THREADS):
            flat = bind(index * THREADS + tx)
            line, column = bind(flat // DEPTH), bind(flat % DEPTH)
            value = _bounded(partial(tile.read, line), step * DEPTH + column, spec.inputs)
            put(left, _rounded(value, form), column * TILE + line)
        _load_weights(buffers.matrix, (right, form), (tile.matrix, bind(bx * TILE), spec.outputs), (step, tx))
        barrier()
        with T.serial(DEPTH) as column:
            places = (tx // _ACROSS * _SIDE, tx % _ACROSS * _SIDE)
            left_values, other = (
                [bind(floating(tile[column * TILE + place + i])) for i in range(_SIDE)]
                for tile, place in zip((left, right), places, strict=True)
            )
            for i in range(_SIDE):
                for j in range(_SIDE):
                    put(sums, left_values[i] * other[j] + sums[i * _SIDE + j], i * _SIDE + j)
        barrier()
    for i in range(_SIDE):
        line = bind(tx // _ACROSS * _SIDE + i)
        for j in range(_SIDE):
            output = bind(bx * TILE + tx % _ACROSS * _SIDE + j)
            with when(T.And(tile.inside(line), output < spec.outputs)):
                buffers.store(tile.row(line), output, [sums[i * _SIDE + j]], tile.bias)


def _bounded(read: Callable[[Value], Value], column: Value, columns: int) -> Value:
    """Returns the expression read(column), or 0 for the columns that fill up the last tile of 32 columns
    where `columns`, the number of columns of x, is no multiple of 32. `column` must be below the next
    multiple. read: function from a column to an element of a row of x; it is called once, and what it emits
    reads existing columns only."""
    if columns % DEPTH == 0:
        return read(column)
    column = bind(column)
    return T.Select(column < columns, read(T.min(column, columns - 1)), number(0))


def _rounded(value: Value, form: str) -> Value:
    """Returns a float32 value converted to `form`, the type of a tile in shared memory, float32 or float16.
    For float16 it is limited to -65504 .. 65504, so that it does not become infinite.
    """
    if form == "float32":
        return value
    return T.Cast(form, T.max(T.min(value, number(_LARGEST_HALF)), number(-_LARGEST_HALF)))


def _load_weights(
    matrix: StoredMatrix, to: tuple[Value, str], rows: tuple[Value | int, Value, int], at: tuple[Value, Value]
) -> None:
    """Emits code that writes a tile of 64 rows and 32 columns of a matrix into shared memory, dequantized and
    transposed. Each thread reads chunks of four columns. Rows beyond the end of the matrix repeat its last
    row; no barrier is emitted.

    to: (array in shared memory, its dtype); rows: (index of the matrix's first row in the stored tensors,
    which may hold several matrices; index of the tile's first row in the matrix; number of rows of the
    matrix); at: (index of the tile's 32 columns, index of the thread)."""
    (base, first, count), (step, tx), chunks, (tile, form) = rows, at, DEPTH // CHUNK, to
    for index in range(TILE * chunks // THREADS):
        flat = bind(index * THREADS + tx)
        output, chunk = flat // chunks, bind(flat % chunks)
        row = bind(base + T.min(first + output, count - 1))
        for place, value in enumerate(matrix.chunk_at(row, step, chunk)):
            put(tile, _rounded(value, form), (chunk * CHUNK + place) * TILE + output)
