"""Emits the top_k, top_p and min_p filters of the sampling kernel, without sorting.

Every filter is a threshold on logits: min_p's is computed directly, and those of top_k and top_p are the
largest thresholds that keep the requested number or weight of tokens. They are searched by bisection: over
the whole row while many tokens lie between the bounds, then over a list of the few that are left. Blocks
whose largest logit lies below the lower bound are not read again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.floats import Floats
from mlcbuild.compiler.cpu.kernels.sampling_row import (
    BLOCK,
    FAR,
    TASK,
    LogitBlock,
    Row,
    infinity,
    sum_block,
)
from mlcbuild.compiler.cpu.kernels.vectors import Register, f32, i32, intrinsic, register

FEW = 512
"""The search for a sampling threshold bisects until at most this number of tokens lie between its two bounds;
these are then copied to a list. On a core of Zen 5, limits of 128 and 2048 take the same time within 6 %
(`ci/bench/constants`).
"""
_LIMITED = 1 << 8
"""Maximum number of bisections in a search for a threshold on logits. Each halves the distance of its bounds,
which is 87 times the temperature at first, and float32 numbers near zero may be only 2**-149 apart."""


@dataclass(frozen=True)
class _Bounds:
    """The interval in which bisection searches a threshold on logits. The threshold `low` keeps enough
    tokens, or enough of their weight, `high` too few.
    """

    low: Register
    high: Register
    above: Register  # float64: weight or number of tokens kept at `high`

    @classmethod
    def of(cls, low: Register, most: Expr) -> _Bounds:
        return cls(low, register(most, 1), register(T.float64(0), 1, "float64"))

    def settle(self, mid: Expr, enough: Expr, less: Expr) -> None:
        self.low.set(T.Select(enough, mid, self.low.value))
        self.high.set(T.Select(less, mid, self.high.value))

    @property
    def middle(self) -> Expr:
        return T.bind(self.low.value + (self.high.value - self.low.value) * T.float32(0.5))

    def divides(self, mid: Expr) -> Expr:
        return T.And(self.low.value < mid, mid < self.high.value)


def set_filters(row: Row, most: Expr, least: Register) -> None:
    """Emits code that applies min_p and top_k to a row, and top_p to the tokens that they keep: it writes the
    smallest logit that may be sampled to the register `least`, and the sum of weights of the allowed tokens
    of each block to the row's buffer of sums. most: the row's largest logit. 1 / temperature of the row must
    be greater than 0.
    """
    room = T.alloc_buffer((T.bind(row.blocks * BLOCK),), "float32")
    floor = T.Cast("float32", T.Cast("float64", most) + row.parameter("logit_drop"))
    least.set(T.max(floor, T.bind(most - T.float32(FAR) / row.scale)))
    top_k, top_p = row.parameter("top_k"), row.parameter("top_p")
    with T.If(T.And(top_k > T.float64(0), top_k < T.Cast("float64", row.width))), T.Then():
        guess = register(least.value, 1)
        with T.If(top_k <= T.Cast("float64", row.blocks)), T.Then():
            bounds = _Bounds.of(guess, most)
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
    """Emits a fast natural logarithm of a positive float32, from its bits, and returns it; the result is up
    to 0.06 too small.
    """
    bits = T.Cast("float32", T.reinterpret("int32", value))
    return (bits * T.float32(2.0**-23) - T.float32(127.0)) * T.float32(math.log(2.0))


def _weigh(row: Row, most: Expr, least: Expr, room: Buffer) -> None:
    floats = row.floats
    with T.serial(row.blocks) as block, T.If(row.top(block) >= least):
        with T.Then():
            source = row.logit_block(block)

            def vector(at: Expr) -> Expr:
                logit = T.bind(source.load(floats, at))
                weight = T.bind(row.weight(floats, logit, most))
                kept_weight = T.bind(T.Select(logit >= floats.spread(least), weight, floats.constant(0.0)))
                floats.store(room, kept_weight, block * BLOCK + at)
                return kept_weight

            sum_block(row, block, vector)
        with T.Else():
            T.buffer_store(row.sums, T.float32(0), [row.row, block])


def _restrict(row: Row, least: Expr, room: Buffer) -> None:
    """Emits code that recomputes, in `row.sums`, the sum of sampling weights of each block of 256 tokens of a
    row, leaving out tokens whose logits are below `least`. room: buffer with the weights of all tokens of the
    row.
    """
    floats = row.floats
    with T.serial(row.blocks) as block, T.If(row.top(block) >= least):
        with T.Then():
            source = row.logit_block(block)

            def vector(at: Expr) -> Expr:
                is_kept = source.load(floats, at) >= floats.spread(least)
                weight = floats.load(room, block * BLOCK + at)
                return T.bind(T.Select(is_kept, weight, floats.constant(0.0)))

            sum_block(row, block, vector)
        with T.Else():
            T.buffer_store(row.sums, T.float32(0), [row.row, block])


def _select(row: Row, start: tuple[Register, Expr, Expr], room: Buffer | None, goal: Expr) -> None:
    """Emits a search for the largest threshold on a row's logits that at least `goal` tokens reach, and
    stores it in the threshold's register. room: None, or a buffer with the sampling weights of all tokens;
    `goal` is then a sum of their weights, not a number of tokens. start: (register of the threshold, which
    holds the lowest threshold at first and keeps it if the row does not reach `goal`; the row's largest
    logit; the first threshold to try)."""
    least, most, guess = start
    bounds = _Bounds.of(least, most)
    inside, below = (register(T.Cast("float64", row.width), 1, "float64") for _ in range(2))
    turn = register(i32(0), 1, "int32")
    tried = [register(T.Select(bounds.divides(guess), guess, bounds.middle), 1), register(most, 1)]
    more = T.Or(turn.value == 0, inside.value > T.float64(FEW))
    with T.While(T.And(more, turn.value < _LIMITED)):
        mids = [T.bind(mid.value) for mid in tried]
        for mid, measured in zip(mids, _measure(row, mids, room), strict=True):
            enough = T.bind(T.And(measured >= goal, mid > bounds.low.value))
            less = T.bind(T.And(measured < goal, T.Or(mid < bounds.high.value, turn.value == 0)))
            bounds.settle(mid, enough, less)
            below.set(T.Select(enough, measured, below.value))
            bounds.above.set(T.Select(less, measured, bounds.above.value))
        between = T.bind(below.value - bounds.above.value)
        _aim(bounds, tried, T.bind(T.Cast("float32", (below.value - goal) / between)), turn.value)
        # No token between the bounds has less weight than a token at the lower bound.
        each = T.float32(1) if room is None else row.weight(row.floats.scalar, bounds.low.value, most)
        inside.set(between / T.Cast("float64", each))
        turn.set(T.Select(bounds.divides(bounds.middle), turn.value + 1, T.int32(_LIMITED)))
    with T.If(T.And(inside.value <= T.float64(FEW), least.value < bounds.high.value)), T.Then():
        size = FEW + row.floats.lanes
        lists = [T.alloc_buffer((size,), "float32") for _ in range(1 if room is None else 2)]
        count = _listed(row, bounds, room, lists)
        # The list may be too short where rounding hides tokens, whose weight is then negligible.
        with T.If(count <= FEW), T.Then():
            _narrow(row.floats, (lists[0], ()), count, lists[1:], (bounds, goal))


def _aim(bounds: _Bounds, tried: list[Register], share: Expr, turn: Expr) -> None:
    """Emits code that chooses the two thresholds on logits that a bisection tests next, and writes them to
    the registers `tried`, the lower one first. They lie just below and above the point that linear
    interpolation expects; in every third iteration they lie at 1/3 and 2/3, since interpolation may be far
    off. bounds: registers with the interval; share: the expected point, from 0 at the lower bound to 1 at the
    upper one; turn: number of the iteration.
    """
    low, wide = T.bind(bounds.low.value), T.bind(bounds.high.value - bounds.low.value)
    line = T.bind(T.truncmod(turn, T.int32(3)) != 2)
    share = T.bind(T.min(T.max(share, T.float32(3 / 32)), T.float32(29 / 32)))
    sides = (share - T.float32(1 / 16), T.float32(1 / 3)), (share + T.float32(1 / 16), T.float32(2 / 3))
    for register_, (near, third) in zip(tried, sides, strict=True):
        mid = T.bind(low + wide * T.Select(line, near, third))
        register_.set(T.Select(bounds.divides(mid), mid, bounds.middle))


def _measure(row: Row, mids: list[Expr], room: Buffer | None) -> list[Expr]:
    """Emits code that counts, for each of two thresholds, the lower one first, the tokens of a row whose
    logits reach it, or sums their weights if `room`, a buffer with the weights of all tokens, is passed. It
    returns both results as float64.
    """
    floats, lanes = row.floats, row.floats.lanes
    totals = [register(T.float64(0), 1, "float64") for _ in mids]
    with T.serial((row.blocks + (TASK - 1)) // TASK) as group:
        # Two sums for each logit, because an addition waits for the previous one.
        sums = [[register(f32(0, lanes), lanes) for _ in range(2)] for _ in mids]
        with T.serial(T.min(T.int64(TASK), row.blocks - group * TASK)) as number:
            block = T.bind(group * TASK + number)

            def add(source: LogitBlock) -> None:
                with T.serial(BLOCK // (2 * lanes)) as k:
                    for half in range(2):
                        at = T.bind((k * 2 + half) * lanes)
                        logit, value = T.bind(source.load(floats, at)), floats.constant(1.0)
                        if room is not None:
                            value = T.bind(floats.load(room, block * BLOCK + at))
                        for mid, parts in zip(mids, sums, strict=True):
                            kept_value = T.Select(logit >= floats.spread(mid), value, floats.constant(0.0))
                            parts[half].set(parts[half].value + kept_value)

            with T.If(row.top(block) >= mids[0]), T.Then():
                add(row.logit_block(block))
        for total, (even, odd) in zip(totals, sums, strict=True):
            both = floats.fold(even.value + odd.value, lambda a, b: a + b)
            total.set(total.value + T.Cast("float64", both))
    return [T.bind(total.value) for total in totals]


def _listed(row: Row, bounds: _Bounds, room: Buffer | None, lists: list[Buffer]) -> Expr:
    """Emits the copy of up to 512 logits of a row, those from bounds.low up to, but without, bounds.high, to
    the buffer lists[0], and of their sampling weights to lists[1] if `room`, a buffer with the weights of all
    tokens, is passed. It returns the number of logits between the bounds, which may be larger than 512.
    """
    floats, scalar, lanes = row.floats, row.floats.scalar, row.floats.lanes
    low, high = T.bind(bounds.low.value), T.bind(bounds.high.value)
    count = register(T.int64(0), 1, "int64")

    def copy(block: Expr, source: LogitBlock, start: Expr) -> None:
        with T.serial(lanes) as lane:
            at = T.bind(start + lane)
            logit = T.bind(source.load(scalar, at))
            place = T.bind(T.min(count.value, T.int64(FEW)))
            T.buffer_store(lists[0], logit, [place])
            if room is not None:
                T.buffer_store(lists[1], room[block * BLOCK + at], [place])
            inside = T.And(logit >= low, logit < high)
            count.set(count.value + T.Select(inside, T.int64(1), T.int64(0)))

    def look(block: Expr, source: LogitBlock) -> None:
        def vector(at: Expr) -> None:
            logit = T.bind(source.load(floats, at))
            inside = T.And(logit >= floats.spread(low), logit < floats.spread(high))
            flags = T.Select(inside, i32(1, lanes), i32(0, lanes))
            with T.If(intrinsic("int32", "llvm.vector.reduce.or", flags) != 0), T.Then():
                copy(block, source, at)

        row.vectors(vector)

    with T.serial(row.blocks) as block, T.If(row.top(block) >= low), T.Then():
        look(block, row.logit_block(block))
    return T.bind(count.value)


def _narrow(
    floats: Floats,
    values: tuple[Buffer, tuple[Expr, ...]],
    count: Expr,
    weights: list[Buffer] | None,
    aim: tuple[_Bounds, Expr],
) -> None:
    """Emits a bisection for a threshold on the first `count` logits of a buffer, which must have room for
    whole vectors: the emitted code pads the last one. Afterwards bounds.low is the largest threshold that
    keeps the requested number of tokens, or the requested sum of weights; bounds.above, the part of them that
    lies at or above bounds.high and is not in the buffer, counts, too. values: (buffer, index of its row);
    weights: [buffer with the logits' weights], or empty or None to count tokens; aim: (bounds, requested
    number or sum).
    """
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
            is_kept = floats.load(buffer, *index, k * lanes) >= floats.spread(tried)
            value = floats.load(weights[0], k * lanes) if weights else floats.constant(1.0)
            total.set(total.value + T.Select(is_kept, value, floats.constant(0.0)))
        measured = T.Cast("float64", floats.fold(total.value, lambda a, b: a + b)) + bounds.above.value
        bounds.settle(tried, T.bind(measured >= goal), T.bind(measured < goal))
        mid.set(bounds.middle)
        going.set(going.value + 1)
