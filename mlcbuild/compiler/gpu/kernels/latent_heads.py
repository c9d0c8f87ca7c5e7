"""Emits GPU kernels of latent attention (MLA): the two parts of queries with the cached row of a token, and
the product of each head's vector with that head's matrix.

Vectors of heads are numbered token by token: that of head h in row r has the index r * heads + h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.norm_rows import NormSpec, NormVectors, row_statistics
from mlcbuild.compiler.gpu.kernels.normed_factors import Factors, RowBlock
from mlcbuild.compiler.gpu.kernels.page_layout import CacheSpec, InputPlaces
from mlcbuild.compiler.gpu.kernels.product import (
    GemvShape,
    Outputs,
    ProductBuffers,
    ProductSpec,
    finish,
    lanes_of,
)
from mlcbuild.compiler.gpu.kernels.storage import RowsOf
from mlcbuild.compiler.gpu.kernels.tile_product import THREADS, TILE, TileRows, multiply_tile
from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    Value,
    barrier,
    bind,
    in_workgroups,
    kernel,
    put,
    strided,
    when,
)


@dataclass(frozen=True)
class LatentSpec:
    """The sizes of queries and keys in latent attention."""

    heads: int
    latent: int
    head_dim: int
    """Number of dimensions of a head's query that are not rotated; the rotated ones follow them."""
    rope_dim: int
    rows: int
    """Number of positions in the table of cosines and sines of a rotary embedding."""

    @property
    def query_dim(self) -> int:
        return self.head_dim + self.rope_dim

    @property
    def cached(self) -> int:
        return self.latent + self.rope_dim

    def rotated(self, table: Value, position: Value, read: Callable[[Value], Value], index: Value) -> Value:
        """Returns element `index` of the rotated part of a query or key, after rotary embedding. Pairs are
        (i, i + rope_dim / 2). table: buffer whose row `position` holds the cosines, then the sines; read:
        function from an index in the rotated part to the element before rotation.
        """
        half = self.rope_dim // 2
        pair = bind(index % half)
        cosine, sine = bind(table[position, pair]), bind(table[position, half + pair])
        partner = read(bind(T.Select(index < half, index + half, index - half)))
        signed = T.Select(index < half, -partner, partner)
        return read(index) * cosine + signed * sine


def prepare_latents(
    name: str, cache: CacheSpec, spec: LatentSpec, norm: NormSpec, inputs: InputPlaces
) -> KernelBuilder:
    """Returns the kernel between the first products of latent attention and those of each head. One workgroup
    for each head and row splits the query, a part of `queries` float32 [n, heads * (head_dim + rope_dim)]: it
    copies the first head_dim values, which are not rotated, to `plain` [n * heads, head_dim], and rotates the
    others and writes them to the last rope_dim columns of the head in `query` [n, heads * (latent +
    rope_dim)], whose first `latent` columns stay unchanged. One more workgroup for each row normalizes the
    latent in `latents` float32 [n, latent + rope_dim], rotates the key that follows it and that all heads
    share, and writes both to the KV cache.
    """
    with kernel(name) as k:
        n = k.size("n")
        buffers = (
            k.buffer("queries", (n, spec.heads * spec.query_dim)),
            k.buffer("plain", (n, spec.heads * spec.head_dim)),
            k.buffer("query", (n, spec.heads * spec.cached)),
        )
        table, block = k.buffer("table", (spec.rows, spec.rope_dim)), inputs.declare(k)
        latents, pages = k.buffer("latents", (n, spec.cached)), cache.declare(k)
        vectors = NormVectors.declare(k, norm)
        with k.launch(WORKGROUP, spec.heads + 1, "n") as (head, row, tx):
            rotated = partial(spec.rotated, table, bind(block[inputs.positions + row]))
            with when(head < spec.heads):
                _split_query(spec, buffers, (head, row, tx), rotated)
            with in_workgroups(head == spec.heads):
                result = k.shared(spec.cached)
                _, root = row_statistics(k, norm, tx, lambda at: latents[row, at])

                def normalize(index: Value) -> None:
                    put(result, vectors.scaled(latents[row, index] * root, index), index)

                def rotate(index: Value) -> None:
                    value = rotated(lambda at: bind(latents[row, spec.latent + at]), index)
                    put(result, value, spec.latent + index)

                strided(spec.latent, tx, WORKGROUP, normalize)
                strided(spec.rope_dim, tx, WORKGROUP, rotate)
                barrier()
                cache.append(pages, result, (0, 0, bind(block[inputs.slots + row])), tx)
    return k


def _split_query(
    spec: LatentSpec,
    buffers: tuple[Value, Value, Value],
    at: tuple[Value, Value, Value],
    rotated: Callable[[Callable[[Value], Value], Value], Value],
) -> None:
    """Emits code that splits one head's query into its two parts, and rotates the second. buffers: (queries,
    the parts that are not rotated, the parts that are); at: (head, row, index of the thread); rotated:
    function of (function that reads an element before rotation, index of an element) that returns this
    element after the rotation."""
    (queries, plain, query), (head, row, tx) = buffers, at

    def copy(index: Value) -> None:
        put(plain, queries[row, head * spec.query_dim + index], row, head * spec.head_dim + index)

    def rotate(index: Value) -> None:
        start = bind(head * spec.query_dim + spec.head_dim)
        value = rotated(lambda place: bind(queries[row, start + place]), index)
        put(query, value, row, head * spec.cached + spec.latent + index)

    strided(spec.head_dim, tx, WORKGROUP, copy)
    strided(spec.rope_dim, tx, WORKGROUP, rotate)


def head_gemv(name: str, spec: ProductSpec, heads: int) -> KernelBuilder:
    """Returns the kernel y[vector] = x[vector] W^T for few rows: x is float32 [n * heads, inputs], y [n *
    heads, outputs], and W the matrix number vector % heads of a stack with one matrix for each head."""
    shape = GemvShape(spec, 1, lanes_of(spec))
    with kernel(name) as k:
        vectors = k.size("vectors")
        x = RowsOf.declare(k, "x", vectors, spec.inputs)
        buffers = ProductBuffers.declare(k, spec, heads, results=vectors)
        with k.launch(shape.threads, shape.groups_of_outputs, "vectors") as (bx, vector, tx):
            block, outputs = RowBlock(x, vector, 1, vectors), shape.outputs(bx, tx)
            first = bind(vector % heads * shape.rows)
            matrix_rows = [bind(first + row) for row in shape.matrix_rows(outputs)]
            sums = shape.sums(buffers.matrix, matrix_rows, Factors(block, None, spec.inputs), tx)
            target = Outputs(buffers, vector, 1, lambda vector: vector < vectors, outputs, None)
            finish(k, [target], sums, None, (shape.lanes, tx))
    return k


def head_gemm(name: str, spec: ProductSpec, heads: int) -> KernelBuilder:
    """Returns the kernel y[vector] = x[vector] W^T for many rows: x is float32 [n * heads, inputs], y [n *
    heads, outputs], and W the matrix number vector % heads of a stack with one matrix for each head. It
    computes tiles of 64 rows of one head."""
    with kernel(name) as k:
        n, vectors = k.scalar("n"), k.size("vectors")
        x = k.buffer("x", (vectors, spec.inputs))
        buffers = ProductBuffers.declare(k, spec, heads, results=vectors)
        grid = -(-spec.outputs // TILE), ("mul", ("div", "n", TILE), heads)
        with k.launch(THREADS, *grid) as (bx, by, tx):
            head, first = bind(by % heads), bind(by // heads * TILE)

            def vector(line: Value) -> Value:
                return bind(T.min(first + line, n - 1) * heads + head)

            rows = TileRows(
                vector,
                lambda line: first + line < n,
                lambda line, column: x[vector(line), column],
                bind(head * spec.outputs),
            )
            multiply_tile(k, buffers, rows, (bx, tx))
    return k
