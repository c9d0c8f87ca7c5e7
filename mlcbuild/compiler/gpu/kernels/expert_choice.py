"""Emits GPU kernels that choose the experts of each row, order the choices of a prompt by expert, and add up
experts' outputs.

A choice is a pair (row, index among the row's choices), numbered row * chosen + index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Var

from mlcbuild.compiler.gpu.kernels.activations import sigmoid
from mlcbuild.compiler.gpu.kernels.norm_rows import row_sum
from mlcbuild.compiler.gpu.kernels.tile_product import TILE
from mlcbuild.compiler.gpu.reductions import reduced
from mlcbuild.compiler.gpu.tensorir import (
    LOWEST,
    WORKGROUP,
    KernelBuilder,
    Value,
    barrier,
    bind,
    covering,
    either,
    exact,
    kernel,
    local,
    number,
    put,
    strided,
    when,
)
from mlcbuild.models import Experts
from mlcbuild.models.experts import SMALLEST_LOGIT, SMALLEST_SUM

_SORTERS = 256


@dataclass(frozen=True)
class Routes:
    """The buffer `routes` of a GPU kernel with a call's choices of experts: pairs of int32, the number of the
    expert and the bits of its weight, a float32. Two buffers would be one too many for kernels that read both
    and the matrices of experts, since every device binds no more than 8.
    """

    pairs: Value

    @classmethod
    def declare(cls, k: KernelBuilder, *shape: int | Var) -> Routes:
        """Declares the kernel's buffer `routes` and returns it. shape: of the choices, either [rows, choices
        of a row] or [choices of all rows]; the methods' `choice` is an index of that many dimensions.
        """
        return cls(k.buffer("routes", (*shape, 2), "int32"))

    def expert(self, *choice: Value) -> Value:
        return self.pairs[(*choice, 0)]

    def weight(self, *choice: Value) -> Value:
        return T.reinterpret("float32", bind(self.pairs[(*choice, 1)]))

    def put_expert(self, expert: Value, *choice: Value | int) -> None:
        put(self.pairs, expert, *choice, 0)

    def put_weight(self, weight: Value, *choice: Value | int) -> None:
        put(self.pairs, T.reinterpret("int32", bind(weight)), *choice, 1)


def route(name: str, spec: Experts) -> KernelBuilder:
    """Returns the kernel that chooses experts from the router's `logits` float32 [n, experts]. It writes
    their numbers and weights to the Routes [n, chosen], the best first. A buffer `correction` float32
    [experts], if the router has one, is added to scores for the choice only.
    """
    with kernel(name) as k:
        n = k.size("n")
        logits = k.buffer("logits", (n, spec.count))
        correction = k.buffer("correction", (spec.count,)) if spec.router.correction else None
        routes = Routes.declare(k, n, spec.chosen)
        with k.launch(WORKGROUP, "n") as (row, _, tx):
            choice = _Choice(k, spec, (row, tx), routes)
            if spec.router.scores == "sparsemixer":
                choice.sparsemixer(logits)
            else:
                choice.scored(logits, correction)
    return k


class _Choice:
    """Emits code that chooses the experts of one row from the router's logits, by their scores or by the
    sparsemixer rule, and writes their numbers and weights to the Routes [n, chosen]. All threads of a
    workgroup compute it together."""

    def __init__(self, k: KernelBuilder, spec: Experts, at: tuple[Value, Value], routes: Routes) -> None:
        """Emits the allocation of the arrays in shared memory (scores, sums, chosen experts) with which a
        workgroup chooses the experts of one row. at: (index of the row, index of the thread); routes: the
        buffer [n, chosen] that the choice is written to.
        """
        self._spec, (self._row, self._tx), self._routes, self._k = spec, at, routes, k
        self._scores, self._left = k.shared(spec.count), k.shared(spec.count)
        self._sums, self._picked = k.shared(WORKGROUP), k.shared(spec.chosen)
        if spec.router.groups > 1:
            self._groups, self._kept = k.shared(spec.router.groups), k.shared(spec.count)

    def scored(self, logits: Value, correction: Value | None) -> None:
        """Emits code that chooses the experts of a row by the largest scores, which are the sigmoid or
        softmax of the logits. It writes to the Routes, the best first, their numbers and their weights: their
        scores, divided by the sum of those of the chosen experts if the router normalizes, times its scale.
        logits: buffer with the router's logits; correction: buffer float32 [experts] of numbers that are
        added to the scores for the choice only, or None."""
        spec, tx = self._spec, self._tx
        self._score(logits)

        def start(e: Value) -> None:
            score = self._scores[e]
            put(self._left, score if correction is None else score + correction[e], e)

        covering(spec.count, tx, WORKGROUP, start)
        barrier()
        left = self._left if spec.router.groups == 1 else self._of_best_groups()

        def choose(e: Value) -> None:
            rank, score = self._rank(left, e, spec.count), bind(self._scores[e])
            with when(rank < spec.chosen):
                self._routes.put_expert(e, self._row, rank)
            with when(rank < spec.chosen):
                put(self._picked, score, rank)

        covering(spec.count, tx, WORKGROUP, choose)
        barrier()
        factor = exact(spec.router.scale)
        if spec.router.normalized:
            total = local(1)
            put(total, number(0), 0)
            with T.serial(spec.chosen) as place:
                put(total, total[0] + self._picked[place], 0)
            factor = bind(factor / T.max(total[0], exact(SMALLEST_SUM)))
        strided(
            spec.chosen,
            tx,
            WORKGROUP,
            lambda place: self._routes.put_weight(self._picked[place] * factor, self._row, place),
        )

    def _score(self, logits: Value) -> None:
        """Emits code that computes the scores of all experts for one row, sigmoid or softmax of its logits,
        into shared memory, float32 [experts]. logits: buffer float32 [n, experts] of the router's logits.
        """
        count, row, tx = self._spec.count, self._row, self._tx
        if self._spec.router.scores == "sigmoid":
            covering(count, tx, WORKGROUP, lambda e: put(self._scores, sigmoid(logits[row, e]), e))
            barrier()
            return
        thread_largest = local(1)
        put(thread_largest, number(LOWEST), 0)
        covering(
            count, tx, WORKGROUP, lambda e: put(thread_largest, T.max(thread_largest[0], logits[row, e]), 0)
        )
        (largest,) = reduced(self._k, [thread_largest[0]], [self._sums], (tx, WORKGROUP), "max")
        barrier()
        total = row_sum(self._k, self._sums, tx, count, lambda e: T.exp(logits[row, e] - largest))
        covering(
            count, tx, WORKGROUP, lambda e: put(self._scores, T.exp(logits[row, e] - largest) / total, e)
        )
        barrier()

    def _rank(self, values: Value, index: Value, count: int) -> Value:
        """Emits the computation of the rank of element `index` of the array `values`, which has `count`
        elements, and returns it: the number of larger elements and of equal ones with a lower index.
        """
        value_here, rank = bind(values[index]), local(1, "int32")
        put(rank, T.int32(0), 0)
        with T.serial(count) as other:
            value = bind(values[other])
            before = T.Or(value > value_here, T.And(value == value_here, other < index))
            with when(before):
                put(rank, rank[0] + 1, 0)
        return bind(rank[0])

    def _of_best_groups(self) -> Value:
        """Emits the choice of the router's `groups_kept` best groups of experts, and returns an array in
        shared memory of all experts' scores, in which those of all other groups are -1e30. A group's score is
        the largest of its experts' or the sum of the two largest, as the router defines.
        """
        router, tx = self._spec.router, self._tx
        size = self._spec.count // router.groups

        def add_up(group: Value) -> None:
            best = local(2)
            put(best, number(LOWEST), 0)
            put(best, number(LOWEST), 1)
            with T.serial(size) as place:
                value = bind(self._left[group * size + place])
                put(best, T.max(best[1], T.min(best[0], value)), 1)
                put(best, T.max(best[0], value), 0)
            put(self._groups, best[0] if router.group_by_largest else best[0] + best[1], group)

        def keep(e: Value) -> None:
            rank = self._rank(self._groups, bind(e // size), router.groups)
            put(self._kept, either(rank < router.groups_kept, self._left[e], number(LOWEST)), e)

        covering(router.groups, tx, WORKGROUP, add_up)
        barrier()
        covering(self._spec.count, tx, WORKGROUP, keep)
        barrier()
        return self._kept

    def sparsemixer(self, logits: Value) -> None:
        """Emits code that chooses two experts by the sparsemixer rule of Phi-3.5-MoE. It writes their numbers
        and weights to the Routes [n, 2], the best first. Each time it chooses the largest logit L that is
        left; the weight is 1 / the sum of exp(logit - L) over the experts left with (L - logit) /
        max(|logit|, L) <= 2 * jitter, where 0 / 0 is 0. All threads of the workgroup compute the same.
        """
        assert self._spec.router.jitter is not None
        limit, count, row = exact(2 * self._spec.router.jitter), self._spec.count, self._row
        covering(count, self._tx, WORKGROUP, lambda e: put(self._left, logits[row, e], e))
        barrier()
        place, numbers = local(1, "int32"), local(2)

        def each(body: Callable[[Value, Value], None]) -> None:
            with T.serial(count) as e:
                body(e, bind(self._left[e]))

        for turn in range(2):
            put(place, T.int32(0), 0)
            put(numbers, number(LOWEST), 0)
            put(numbers, number(0), 1)

            def best(e: Value, value: Value) -> None:
                with when(value > numbers[0]):
                    put(place, e, 0)
                    put(numbers, value, 0)

            def add(e: Value, value: Value) -> None:
                logit, largest = bind(logits[row, e]), numbers[0]
                size = T.max(T.max(T.max(logit, -logit), largest), number(SMALLEST_LOGIT))
                near = T.And((largest - logit) / size <= limit, value > number(LOWEST))
                put(numbers, numbers[1] + either(near, T.exp(value - largest), number(0)), 1)

            each(best)
            each(add)
            chosen = bind(place[0])
            with when(self._tx == 0):
                self._routes.put_expert(chosen, row, turn)
            with when(self._tx == 0):
                self._routes.put_weight(number(1) / numbers[1], row, turn)
            barrier()
            put(self._left, number(LOWEST), chosen)
            barrier()


def sort_choices(name: str, spec: Experts) -> KernelBuilder:
    """Returns the kernel that sorts choices, pairs (row, expert), by expert and then by row. It reads the
    chosen experts of all rows, one row after the other, from the Routes [choices]. It writes indices of
    choices to `order` int32 [choices], and tiles, runs of up to 64 choices of one expert, to `tiles` int32
    [tile_count, 3]: the expert's number, the index in `order` of the first choice, and the number of choices,
    which is 0 for unused tiles.
    """
    with kernel(name) as k:
        choices, count = k.size("choices"), k.size("tile_count")
        routes = Routes.declare(k, choices)
        order, tiles = k.buffer("order", (choices,), "int32"), k.buffer("tiles", (count, 3), "int32")
        with k.launch(_SORTERS, 1) as (_, _y, tx):
            counts = k.shared(spec.count, "int32")

            def count_own(e: Value) -> None:
                count = local(1, "int32")
                put(count, T.int32(0), 0)
                with T.serial(choices) as choice, when(routes.expert(choice) == e):
                    put(count, count[0] + 1, 0)
                put(counts, count[0], e)

            def place_own(e: Value) -> None:
                at, tile = _sums_before(counts, e)
                count = bind(counts[e])
                with T.serial((count + TILE - 1) // TILE) as index:
                    put(tiles, e, tile[0] + index, 0)
                    put(tiles, at[0] + index * TILE, tile[0] + index, 1)
                    put(tiles, T.min(count - index * TILE, TILE), tile[0] + index, 2)
                with T.serial(choices) as choice, when(routes.expert(choice) == e):
                    put(order, choice, at[0])
                    put(at, at[0] + 1, 0)

            covering(spec.count, tx, _SORTERS, count_own)
            barrier()
            covering(spec.count, tx, _SORTERS, place_own)
            _, used = _sums_before(counts, T.int32(spec.count))
            with T.serial((count - used[0] + _SORTERS - 1) // _SORTERS) as index:
                tile = bind(used[0] + index * _SORTERS + tx)
                with when(tile < count):
                    put(tiles, T.int32(0), tile, 2)
    return k


def _sums_before(counts: Value, expert: Value) -> tuple[Value, Value]:
    """Emits code that computes two sums over all experts with a lower number than `expert`, and returns them
    as arrays of one int32: the number of choices of these experts, and the number of tiles that they fill,
    each with up to 64 choices of one expert. counts: array with the number of choices of each expert."""
    total, tiles = local(1, "int32"), local(1, "int32")
    put(total, T.int32(0), 0)
    put(tiles, T.int32(0), 0)
    with T.serial(expert) as other:
        count = bind(counts[other])
        put(total, total[0] + count, 0)
        put(tiles, tiles[0] + (count + TILE - 1) // TILE, 0)
    return total, tiles


def add_choices(name: str, spec: Experts, columns: int, scale: float, adds: bool) -> KernelBuilder:
    """Returns the kernel y [n, columns] = scale * the sum of the outputs of each row's experts, times their
    weights. It reads the outputs from `parts` [n, chosen * columns] and the weights from the Routes [n,
    chosen]. adds: True if the sum is added to y."""
    with kernel(name) as k:
        n = k.size("n")
        parts = k.buffer("parts", (n, spec.chosen * columns))
        routes, y = Routes.declare(k, n, spec.chosen), k.buffer("y", (n, columns))
        with k.launch(WORKGROUP, -(-columns // WORKGROUP), "n") as (bx, row, tx):
            column = bind(bx * WORKGROUP + tx)
            with when(column < columns):
                total = local(1)
                put(total, number(0), 0)
                with T.serial(spec.chosen) as place:
                    part = parts[row, place * columns + column]
                    put(total, routes.weight(row, place) * part + total[0], 0)
                value = total[0] if scale == 1 else total[0] * exact(scale)
                put(y, y[row, column] + value if adds else value, row, column)
    return k
