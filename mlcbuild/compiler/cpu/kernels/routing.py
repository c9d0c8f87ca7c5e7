"""Emits the kernel that chooses experts in a mixture-of-experts layer, from the router's logits.

The choices of a row for which c experts are chosen are 2 * c float32 values: the numbers of the experts,
ascending, then their weights. A float32 represents numbers of experts exactly. Results are added in this
order, so that a sum depends only on its own row. Of equal scores the lowest number is chosen.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, over_rows, scratch, size_var
from mlcbuild.compiler.cpu.kernels.vectors import Register, f32, i64, register
from mlcbuild.models import Experts
from mlcbuild.models.experts import SMALLEST_LOGIT, SMALLEST_SUM

SERIAL_ROWS = 4
"""Maximum number of rows whose experts one core chooses alone, since waking the other cores would take
longer; `ci/bench/kernels --threads 2` prints how long waking takes."""
_LEAST = float("-inf")


def route(isa: ISA, spec: Experts) -> PrimFunc:
    """Returns the kernel (logits float32 [n, experts], bias [experts]?, correction [experts]?, choices
    float32 [n, 2 * chosen] out) that chooses experts for each row. The bias is added to logits, a correction
    to scores for choosing only. It may overwrite logits, and writes, for each row, the chosen experts'
    numbers, ascending, then their weights in the same order. A question mark means: if the router has it."""
    router = spec.router
    with kernel(f"route_{router.scores}") as built:
        rows = size_var("n")
        logits = built.tensor("logits", (rows, spec.count))
        bias = built.tensor("bias", (spec.count,)) if router.bias else None
        correction = built.tensor("correction", (spec.count,)) if router.correction else None
        choices = built.tensor("choices", (rows, 2 * spec.chosen))

        def one_row(row: Expr) -> None:
            if bias is not None:
                _each(spec.count, lambda e: T.buffer_store(logits, logits[row, e] + bias[e], [row, e]))
            picks = _Picks(spec, Floats(isa, 1), scratch((spec.count,)), scratch((2 * spec.chosen,)))
            if router.scores == "sparsemixer":
                picks.sparsemixer(logits, row)
            else:
                picks.scored(logits, row, correction)
            picks.store(choices, row)

        with built.body():
            over_rows(rows, SERIAL_ROWS, one_row)
    return built.func


def _each(count: Expr | int, emit: Callable[[Expr], None]) -> None:
    with T.serial(0, i64(count) if isinstance(count, int) else count) as index:
        emit(index)


class _Picks:
    """Emits the choice of experts for one row of router logits into a scratch buffer float32 [2 * chosen]:
    the experts' numbers in the order in which they are chosen, then their weights.
    """

    def __init__(self, spec: Experts, floats: Floats, left: Buffer, picked: Buffer) -> None:
        """Keeps the scratch buffers in which one row's experts are chosen. left: float32 [experts], the
        scores by which the next expert is chosen, -inf for an expert that has been chosen. picked: float32 [2
        * chosen], numbers of the chosen experts, then their weights.
        """
        self.spec = spec
        self.floats = floats
        self.left = left
        self.picked = picked

    def scored(self, logits: Buffer, row: Expr, correction: Buffer | None) -> None:
        """Emits code that chooses the experts with the largest scores, sigmoid or softmax of the logits, only
        from the best groups if the router has groups, and writes to self.picked, float32 [2 * chosen], the
        numbers of the chosen experts, in the order of choice, then their weights in the same order: the
        scores, divided by their sum if the router normalizes, times its scale. Scores overwrite the logits.
        row: index of the row of logits; correction: float32 [experts] that is added to scores for choosing
        only, or None.
        """
        spec, router = self.spec, self.spec.router
        self._score(logits, row)

        def start(e: Expr) -> None:
            score = logits[row, e]
            T.buffer_store(self.left, score if correction is None else score + correction[e], [e])

        _each(spec.count, start)
        if router.groups > 1:
            self._drop_groups()
        total = register(f32(0), 1)

        def choose(number: Expr) -> None:
            place = self._largest(self.left, spec.count)
            score = T.bind(logits[row, place])
            self._pick(number, place, score)
            total.set(total.value + score)

        _each(spec.chosen, choose)
        factor: Expr = f32(router.scale)
        if router.normalized:
            factor = T.bind(factor / T.max(total.value, f32(SMALLEST_SUM)))
        elif router.scale == 1.0:
            return
        _each(spec.chosen, lambda number: self._weigh(number, self.picked[spec.chosen + number] * factor))

    def _score(self, logits: Buffer, row: Expr) -> None:
        spec, floats = self.spec, self.floats
        if spec.router.scores == "sigmoid":
            _each(
                spec.count, lambda e: T.buffer_store(logits, floats.sigmoid(T.bind(logits[row, e])), [row, e])
            )
            return
        most, total = register(f32(_LEAST), 1), register(f32(0), 1)
        _each(spec.count, lambda e: most.set(T.max(most.value, logits[row, e])))

        def raise_to(e: Expr) -> None:
            share = T.bind(floats.exp(logits[row, e] - most.value))
            T.buffer_store(logits, share, [row, e])
            total.set(total.value + share)

        _each(spec.count, raise_to)
        inverse_total = T.bind(f32(1) / total.value)
        _each(spec.count, lambda e: T.buffer_store(logits, logits[row, e] * inverse_total, [row, e]))

    def _drop_groups(self) -> None:
        """Emits code that keeps only experts of the router's `groups_kept` best groups: it sets self.left to
        -inf for all others. Groups are equally many experts with consecutive numbers. A group's score is the
        largest in self.left of its experts if the router's `group_by_largest` is set, else the sum of the two
        largest.
        """
        router = self.spec.router
        size = self.spec.count // router.groups
        sums, kept_groups = scratch((router.groups,)), scratch((router.groups,))

        def add_up(group: Expr) -> None:
            first, second = register(f32(_LEAST), 1), register(f32(_LEAST), 1)

            def look(e: Expr) -> None:
                value = T.bind(self.left[group * size + e])
                second.set(T.max(second.value, T.min(first.value, value)))
                first.set(T.max(first.value, value))

            _each(size, look)
            score = first.value if router.group_by_largest else first.value + second.value
            T.buffer_store(sums, score, [group])
            T.buffer_store(kept_groups, f32(0), [group])

        def keep(_: Expr) -> None:
            place = self._largest(sums, router.groups)
            T.buffer_store(sums, f32(_LEAST), [place])
            T.buffer_store(kept_groups, f32(1), [place])

        def drop(e: Expr) -> None:
            with T.If(kept_groups[T.truncdiv(e, i64(size))] == f32(0)), T.Then():
                T.buffer_store(self.left, f32(_LEAST), [e])

        _each(router.groups, add_up)
        _each(router.groups_kept, keep)
        _each(self.spec.count, drop)

    def sparsemixer(self, logits: Buffer, row: Expr) -> None:
        """Emits code that chooses experts by the sparsemixer rule of Phi-3.5-MoE and writes their numbers,
        then their weights, to self.picked, float32 [2 * chosen]. Each time the largest logit L that is left
        is chosen; the expert's weight is 1 / the sum of exp(logit - L) over the experts left, itself
        included, with (L - logit) / max(|logit|, L) <= 2 * jitter, where 0 / 0 is 0. row: index of the row of
        logits.
        """
        spec, floats = self.spec, self.floats
        assert spec.router.jitter is not None
        near = f32(2 * spec.router.jitter)
        _each(spec.count, lambda e: T.buffer_store(self.left, logits[row, e], [e]))

        def choose(number: Expr) -> None:
            place = self._largest(self.left, spec.count)
            most, total = T.bind(self.left[place]), register(f32(0), 1)

            def add(e: Expr) -> None:
                logit = T.bind(logits[row, e])
                distance = (most - logit) / T.max(T.max(floats.fabs(logit), most), f32(SMALLEST_LOGIT))
                with T.If(T.And(distance <= near, self.left[e] > f32(_LEAST))), T.Then():
                    total.set(total.value + floats.exp(logit - most))

            _each(spec.count, add)
            self._pick(number, place, f32(1) / total.value)

        _each(spec.chosen, choose)

    def _largest(self, values: Buffer, count: int) -> Expr:
        """Emits a search for the largest of the first `count` values of a float32 buffer, and returns its
        index, the lowest of equal ones. NaN is passed over; 0 if all values are -inf or NaN.
        """
        best, place = register(f32(_LEAST), 1), register(i64(0), 1, "int64")

        def look(index: Expr) -> None:
            value = T.bind(values[index])
            with T.If(value > best.value), T.Then():
                best.set(value)
                place.set(index)

        _each(count, look)
        return T.bind(place.value)

    def _pick(self, number: Expr, place: Expr, weight: Expr) -> None:
        T.buffer_store(self.picked, T.Cast("float32", place), [number])
        self._weigh(number, weight)
        T.buffer_store(self.left, f32(_LEAST), [place])

    def _weigh(self, number: Expr, weight: Expr) -> None:
        T.buffer_store(self.picked, weight, [self.spec.chosen + number])

    def store(self, choices: Buffer, row: Expr) -> None:
        """Emits stores of the chosen experts into row `row` of `choices`, float32 [n, 2 * chosen]: numbers in
        ascending order, then weights in the same order.
        """
        count = self.spec.chosen

        def place(number: Expr) -> None:
            expert, rank = T.bind(self.picked[number]), register(i64(0), 1, "int64")
            _each(count, lambda other: self._count(rank, other, number, expert))
            T.buffer_store(choices, expert, [row, rank.value])
            T.buffer_store(choices, self.picked[count + number], [row, count + rank.value])

        _each(count, place)

    def _count(self, rank: Register, other: Expr, number: Expr, expert: Expr) -> None:
        value = T.bind(self.picked[other])
        before = T.Or(value < expert, T.And(value == expert, other < number))
        with T.If(before), T.Then():
            rank.set(rank.value + 1)
