"""The filters of the kernel that draws tokens, without sorting.

Every filter is a threshold on logits: min_p's is known at once, and those of top_k and top_p are the largest
at which so many tokens, or so much of their weight, is left. They are found by bisection: over the whole row
while many tokens lie between the bounds, over a list of these when they have become few. Blocks whose largest
logit lies below the lower bound are not read again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.kernels.floats import Floats
from mlcbuild.compiler.kernels.sampling_row import (
    BLOCK,
    DROP,
    FAR,
    TASK,
    TOP_K,
    TOP_P,
    Row,
    Source,
    infinity,
    sum_block,
)
from mlcbuild.compiler.kernels.vectors import Register, f32, i32, intrinsic, register

FEW = 1024
"""Tokens between two bounds that are put into a list."""
_LIMITED = 1 << 7
"""Bisections at most: each halves the distance of two numbers that lie 87 temperatures apart."""


@dataclass(frozen=True)
class _Bounds:
    """A threshold is at least `low`, where enough is left, and below `high`, where too little is."""

    low: Register
    high: Register
    inside: Register  # float64: tokens from `low` to `high`, at most
    above: Register  # float64: what is left at `high`

    def settle(self, mid: Expr, enough: Expr) -> None:
        self.low.set(T.Select(enough, mid, self.low.value))
        self.high.set(T.Select(enough, self.high.value, mid))

    @property
    def middle(self) -> Expr:
        return T.bind(self.low.value + (self.high.value - self.low.value) * T.float32(0.5))

    def divides(self, mid: Expr) -> Expr:
        return T.And(self.low.value < mid, mid < self.high.value)


def set_filters(row: Row, most: Expr, least: Register) -> None:
    """Sets the least logit that may be chosen, and what the tokens of each block that may be weigh."""
    room = T.alloc_buffer((T.bind(row.blocks * BLOCK),), "float32")
    floor = T.Cast("float32", T.Cast("float64", most) + row.said(DROP))
    least.set(T.max(floor, T.bind(most - T.float32(FAR) / row.scale)))
    top_k, top_p = row.said(TOP_K), row.said(TOP_P)
    with T.If(T.And(top_k > T.float64(0), top_k < T.Cast("float64", row.width))), T.Then():
        guess = register(least.value, 1)
        with T.If(top_k <= T.Cast("float64", row.blocks)), T.Then():
            bounds = _bounds(row, guess, most)
            _narrow(row.floats, (row.tops, (row.row,)), row.blocks, None, (bounds, top_k))
        _select(row, (least, most, T.bind(guess.value)), None, top_k)
    _weigh(row, most, T.bind(least.value), room)
    with T.If(top_p < T.float64(1)), T.Then():
        total = register(T.float64(0), 1, "float64")
        with T.serial(row.blocks) as block:
            total.set(total.value + T.Cast("float64", row.sums[row.row, block]))
        share = T.bind((T.float64(1) - top_p) * total.value / T.Cast("float64", row.width))
        guess = T.bind(most + _log(T.Cast("float32", share)) / row.scale)
        _select(row, (least, most, guess), room, T.bind(top_p * total.value))
        _restrict(row, T.bind(least.value), room)


def _log(value: Expr) -> Expr:
    """The natural logarithm, or up to 0.06 less, as the bits of a number have it."""
    bits = T.Cast("float32", T.reinterpret("int32", value))
    return (bits * T.float32(2.0**-23) - T.float32(127.0)) * T.float32(math.log(2.0))


def _weigh(row: Row, most: Expr, least: Expr, room: Buffer) -> None:
    floats = row.floats
    with T.serial(row.blocks) as block, T.If(row.top(block) >= least):
        with T.Then():

            def weigh(source: Source) -> None:
                def vector(at: Expr) -> Expr:
                    logit = T.bind(source.load(floats, at))
                    weight = T.bind(row.weight(floats, logit, most))
                    kept = T.bind(T.Select(logit >= floats.spread(least), weight, floats.constant(0.0)))
                    floats.store(room, kept, block * BLOCK + at)
                    return kept

                sum_block(row, block, vector)

            row.each(block, weigh)
        with T.Else():
            T.buffer_store(row.sums, T.float32(0), [row.row, block])


def _restrict(row: Row, least: Expr, room: Buffer) -> None:
    """Takes what is below `least` out of the sums."""
    floats = row.floats
    with T.serial(row.blocks) as block, T.If(row.top(block) >= least):
        with T.Then():

            def restrict(source: Source) -> None:
                def vector(at: Expr) -> Expr:
                    kept = source.load(floats, at) >= floats.spread(least)
                    weight = floats.load(room, block * BLOCK + at)
                    return T.bind(T.Select(kept, weight, floats.constant(0.0)))

                sum_block(row, block, vector)

            row.each(block, restrict)
        with T.Else():
            T.buffer_store(row.sums, T.float32(0), [row.row, block])


def _bounds(row: Row, low: Register, most: Expr) -> _Bounds:
    zero = T.float64(0)
    above, inside = register(zero, 1, "float64"), register(T.Cast("float64", row.width), 1, "float64")
    return _Bounds(low, register(most, 1), inside, above)


def _select(row: Row, known: tuple[Register, Expr, Expr], room: Buffer | None, goal: Expr) -> None:
    """Raises the first of `known` to the largest logit from which on `goal` is left: so many tokens, or so
    much of their weights in `room`. The others: the largest of all, which is tried first, and a guess, which
    is tried then."""
    least, most, guess = known
    bounds = _bounds(row, least, most)
    high = register(T.float64(0), 1, "float64")  # tokens from bounds.high on
    low = register(T.Cast("float64", row.width), 1, "float64")
    mid, going = register(most, 1), register(i32(0), 1, "int32")
    with T.While(T.And(going.value >= 0, going.value < _LIMITED)):
        tried = T.bind(mid.value)
        count, found = _measure(row, tried, room)
        enough = T.bind(found >= goal)
        bounds.settle(tried, enough)
        low.set(T.Select(enough, count, low.value))
        high.set(T.Select(enough, high.value, count))
        bounds.above.set(T.Select(enough, bounds.above.value, found))
        first = T.And(going.value == 0, bounds.divides(guess))
        mid.set(T.Select(first, guess, bounds.middle))
        more = T.And(low.value - high.value > T.float64(FEW), bounds.divides(T.bind(mid.value)))
        going.set(T.Select(more, going.value + 1, T.int32(-1)))
    with T.If(T.And(low.value - high.value <= T.float64(FEW), least.value < bounds.high.value)), T.Then():
        size = FEW + row.floats.lanes
        lists = [T.alloc_buffer((size,), "float32") for _ in range(1 if room is None else 2)]
        count = _listed(row, bounds, room, lists)
        _narrow(row.floats, (lists[0], ()), count, lists[1:], (bounds, goal))


def _measure(row: Row, least: Expr, room: Buffer | None) -> tuple[Expr, Expr]:
    """How many tokens there are from `least` on; and the same, or what they weigh where there is `room`."""
    floats, lanes = row.floats, row.floats.lanes
    totals = [register(T.float64(0), 1, "float64") for _ in range(1 if room is None else 2)]
    with T.serial((row.blocks + (TASK - 1)) // TASK) as group:
        sums = [register(f32(0, lanes), lanes) for _ in totals]
        with T.serial(T.min(T.int64(TASK), row.blocks - group * TASK)) as number:
            block = T.bind(group * TASK + number)

            def add(source: Source) -> None:
                def vector(at: Expr) -> None:
                    kept = source.load(floats, at) >= floats.spread(least)
                    values = [floats.constant(1.0)]
                    if room is not None:
                        values.append(floats.load(room, block * BLOCK + at))
                    for total, value in zip(sums, values, strict=True):
                        total.set(total.value + T.Select(kept, value, floats.constant(0.0)))

                row.vectors(vector)

            with T.If(row.top(block) >= least), T.Then():
                row.each(block, add)
        for total, part in zip(totals, sums, strict=True):
            total.set(total.value + T.Cast("float64", floats.fold(part.value, lambda a, b: a + b)))
    return T.bind(totals[0].value), T.bind(totals[-1].value)


def _listed(row: Row, bounds: _Bounds, room: Buffer | None, lists: list[Buffer]) -> Expr:
    """Copies the logits between two bounds, and their weights; returns how many there are."""
    floats, scalar, lanes = row.floats, row.floats.scalar, row.floats.lanes
    low, high = T.bind(bounds.low.value), T.bind(bounds.high.value)
    count = register(T.int64(0), 1, "int64")

    def copy(block: Expr, source: Source, start: Expr) -> None:
        with T.serial(lanes) as lane:
            at = T.bind(start + lane)
            logit = T.bind(source.load(scalar, at))
            T.buffer_store(lists[0], logit, [count.value])
            if room is not None:
                T.buffer_store(lists[1], room[block * BLOCK + at], [count.value])
            inside = T.And(logit >= low, logit < high)
            count.set(count.value + T.Select(inside, T.int64(1), T.int64(0)))

    def look(block: Expr, source: Source) -> None:
        def vector(at: Expr) -> None:
            logit = T.bind(source.load(floats, at))
            inside = T.And(logit >= floats.spread(low), logit < floats.spread(high))
            flags = T.Select(inside, i32(1, lanes), i32(0, lanes))
            with T.If(intrinsic("int32", "llvm.vector.reduce.or", flags) != 0), T.Then():
                copy(block, source, at)

        row.vectors(vector)

    with T.serial(row.blocks) as block, T.If(row.top(block) >= low), T.Then():
        row.each(block, lambda source: look(block, source))
    return T.bind(count.value)


def _narrow(
    floats: Floats,
    values: tuple[Buffer, tuple[Expr, ...]],
    count: Expr,
    weights: list[Buffer] | None,
    aim: tuple[_Bounds, Expr],
) -> None:
    """As `_select`, over the first `count` values of a buffer that has room for whole vectors."""
    (buffer, index), (bounds, goal), lanes = values, aim, floats.lanes
    vectors = T.bind((count + (lanes - 1)) // lanes)
    with T.serial(vectors * lanes - count) as pad:
        T.buffer_store(buffer, infinity(-1), [*index, count + pad])
        for weight in weights or ():
            T.buffer_store(weight, T.float32(0), [count + pad])
    mid, going = register(bounds.middle, 1), register(i32(0), 1, "int32")
    with T.While(T.And(bounds.divides(mid.value), going.value < _LIMITED)):
        tried, total = T.bind(mid.value), register(f32(0, lanes), lanes)
        with T.serial(vectors) as k:
            kept = floats.load(buffer, *index, k * lanes) >= floats.spread(tried)
            value = floats.load(weights[0], k * lanes) if weights else floats.constant(1.0)
            total.set(total.value + T.Select(kept, value, floats.constant(0.0)))
        found = T.Cast("float64", floats.fold(total.value, lambda a, b: a + b)) + bounds.above.value
        bounds.settle(tried, T.bind(found >= goal))
        mid.set(bounds.middle)
        going.set(going.value + 1)
