"""Emits the division of attention into tasks, and the combination of the partial results of a sequence whose
pages several tasks share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.floats import Floats, registers
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.vectors import i64
from mlcbuild.models import Alibi

PART = 16
"""Number of KV cache pages in one part, when attention divides a sequence with few new rows along its pages.
Reading a part takes several microseconds per head, and a sequence that is long enough to matter has many
parts. On a core of Zen 5, attention takes 5 % longer with parts of 8 pages. With 32 pages it takes up to 6 %
less, but cores of larger machines are idle (`ci/bench/constants`).
"""
FEW = 16
"""Maximum number of new rows of a sequence for which attention is also divided along the sequence's pages. It
covers a token with its draft tokens, but no prompt. On a core of Zen 5, a sequence with 32 new rows takes 14
% longer with this division than without it (`ci/bench/constants`).
"""
LOWEST = -1e30
"""Initial value of the running maximum of attention scores: finite, because the difference of two infinities
is NaN.
"""
HIDDEN = -2e30
"""Value of a masked score. It is so far below the initial value of the running maximum (LOWEST) that its
softmax weight is almost zero (at most about 1e-38), and not NaN.
"""
PAIR = 32
"""Number of query vectors (one head of one row each) whose attention tile registers compute together: two
tiles.
"""
PROMPT_VECTORS, PLAIN_VECTORS = 192, 72
"""Maximum number of query vectors (one head of one row each) of an attention task of a prompt: on AMX tile
registers, and on other processors, where it is a multiple of the vectors of every register tile. They share
the cost of converting keys and values: when it was set, the first number reduced attention to 512 tokens of
SmolLM2-135M's shape from 14.3 to 11.8 ms (`ci/bench/cpu`, two threads of a processor with AMX).
"""
MANY_TASKS = 16
"""Minimum number of attention tasks per KV head for which tasks are ordered by part of a sequence and then by
KV head, if there are few new tokens (SHORT). With fewer tasks, cores would not be equally busy. The order
reduced a step of 8 sequences of SmolLM2-135M's shape from 20.8 to 18.9 ms of CPU time (`ci/bench/cpu`)."""
SHORT = 4
"""Maximum new tokens per sequence, on average, with which a block's tasks for all KV heads run in a row."""


@dataclass(frozen=True)
class AttentionKernel:
    """The parameters of an attention kernel: heads and scores, and how many query vectors it keeps in
    registers and in caches. A query vector is one query head of one row (token).
    """

    isa: ISA
    heads: Heads
    scale: float
    softcap: float | None
    rounded: bool = False
    """True if prompt rows may be computed with queries, keys, values and softmax weights rounded to bfloat16.
    """
    columns: int = 0
    """Number of columns of attention's output [n, columns] if it has more than query heads * value_dim, else
    0. With more columns, AMX stores the output of prompt rows as bfloat16 tiles, which the matrix product
    after attention reads.
    """
    alibi: Alibi | None = None
    sinks: str | None = None
    """Stored type, such as "float16", of the attention sinks (one logit per query head, in the softmax
    denominator only); None if there are none.
    """

    @property
    def has_prompt_variant(self) -> bool:
        """Returns True if the kernel has a variant for prompt rows, which an argument selects."""
        return not self.heads.latent

    @property
    def uses_tiles(self) -> bool:
        """Returns True if prompt rows are computed on AMX tile registers, rounded to bfloat16; otherwise they
        are computed in float32."""
        has_plain_scores = not (self.alibi or self.sinks or self.heads.latent)
        return self.rounded and self.isa.amx and self.heads.dim % 32 == 0 and has_plain_scores

    @property
    def fallback(self) -> str | None:
        """Returns the reason, in words, why attention of prompts does not use AMX although the processor has
        it and the scheme lets prompt rows be rounded to bfloat16. None if it uses AMX, or one of these
        conditions is not met."""
        if not self.rounded or not self.isa.amx or self.uses_tiles:
            return None
        if self.heads.latent:
            return "keys and values are latents: prompts' rows are not rounded"
        if self.alibi or self.sinks:
            return "scores have biases or sinks: prompts' rows are not rounded"
        return f"heads of {self.heads.dim} values are no whole tiles of 32: prompts' rows are not rounded"

    @property
    def registers(self) -> int:
        """Returns the number of vector registers of the processor: 32 with AVX-512 or on Arm, else 16."""
        return 32 if self.isa.lanes == 16 or self.isa.dot == "sdot" else 16

    @property
    def scores(self) -> Floats:
        return Floats.dividing(self.isa, PAGE)

    @property
    def values(self) -> Floats:
        return Floats.dividing(self.isa, math.gcd(self.heads.dim, self.heads.value_dim))

    @property
    def tile(self) -> int:
        """Returns the number of query vectors, 1 to 4, whose scores are computed together. Their scores for
        one page fill at most half of the vector registers. In decoding, the vectors are the query heads that
        share a KV head, so the number is three instead of four if three divides these heads with less waste.
        """
        most, group = max(1, min(4, self.registers * self.scores.lanes // (2 * PAGE))), self.heads.group
        return 3 if most == 4 and group > 2 and -group % 3 < -group % 4 else most

    @property
    def value_vectors(self) -> int:
        """Returns the number of vectors of one head's output that attention keeps in registers at a time for
        each of the query vectors that are computed together: the largest divisor of the number of vectors of
        that output with which all of them fill at most half of the vector registers (at least 1).
        """
        limit = max(1, self.registers // (2 * self.tile))
        vectors = self.heads.value_dim // self.values.lanes
        return max(count for count in range(1, limit + 1) if vectors % count == 0)

    @property
    def block(self) -> int:
        """Returns the maximum number of rows (tokens) of one sequence in an attention task without AMX:
        together about 32 query vectors (one head of one row each), which stay in the first-level cache.
        """
        return max(1, 32 // self.heads.group)

    @property
    def capacity(self) -> int:
        """Returns the number of query vectors (one head of one row each) for which the scratch buffers of an
        attention task without AMX have room: a multiple of the vectors that are computed together.
        """
        return -(-self.block * self.heads.group // self.tile) * self.tile

    @property
    def prompt_tile(self) -> tuple[int, int]:
        """Returns the size of the register tiles of a prompt in float32, (query vectors, vectors of tokens or
        of values): their sums fill three quarters of the registers."""
        columns = 4 if self.isa.lanes == 4 and self.registers == 32 else 2
        return 3 * self.registers // (4 * columns), columns

    @property
    def prompt_block(self) -> int:
        """Returns the maximum number of prompt rows (tokens) of one sequence in an attention task: together
        at most 192 query vectors (one head of one row each) on AMX and 72 in float32, but at least one row.
        """
        most = PROMPT_VECTORS if self.uses_tiles else PLAIN_VECTORS
        return max(1, most // self.heads.group)

    @property
    def prompt_capacity(self) -> int:
        step = PAIR if self.uses_tiles else self.prompt_tile[0]
        return -(-self.prompt_block * self.heads.group // step) * step


@dataclass(frozen=True)
class Call:
    """The tensors to which the emitted code of an attention kernel refers: the kernel's arguments, its table
    of tasks, and its scratch buffers for partial results. A task is some rows of a sequence, for one KV head,
    over the pages that they attend to or over one part (up to 16 pages) of them. A *line* of the scratch
    buffers is the partial result of one row and query head over one part.
    """

    spec: AttentionKernel
    qkv: Buffer
    pages: Buffer
    q_indptr: Buffer
    page_indptr: Buffer
    page_table: Buffer
    kv_lengths: Buffer
    positions: Buffer
    batch: Expr
    layer: Expr
    window: Expr
    prompt: Expr | None
    """The kernel's integer argument that is not 0 for prompt rows; None for a kernel without a variant for
    them.
    """
    slopes: Buffer | None  # float32 [heads], slopes of ALiBi
    sinks: Buffer | None  # [heads]
    out: Buffer
    total: Buffer  # [lines, value_dim]
    denominator: Buffer  # [lines]
    highest: Buffer  # [lines]
    plan: Buffer  # int32 [tasks, 7]: sequence, first row, rows, first page, last page, end, line or -1
    lines: Buffer  # int32 [b, 2]: first line and number of parts of each sequence

    def pages_seen(self, sequence: Expr, first: Expr, count: Expr) -> tuple[Expr, Expr, Expr]:
        """Returns (first page, last page, position after the last token) of what the rows first .. first +
        count - 1 of the batch attend to, within the sliding window. Pages are counted from the start of the
        sequence, and the last page is included. count must be above 0.
        """
        end = T.bind(T.min(self.positions[first + count - 1] + 1, self.kv_lengths[sequence]))
        oldest = T.max(T.Cast("int64", self.positions[first]) - self.window + 1, T.int64(0))
        return T.bind(T.Cast("int32", oldest) // PAGE), T.bind((end - 1) // PAGE), end

    @property
    def block(self) -> Expr:
        """Returns an int32 expression of the kernel: the maximum number of rows (tokens) in an attention
        task, the unit of work in which one core computes some rows of one sequence for one KV head. It is
        larger for prompt rows.
        """
        few, many = T.int32(self.spec.block), T.int32(self.spec.prompt_block)
        return few if self.prompt is None else T.Select(self.prompt == 0, few, many)

    def few(self, count: Expr) -> Expr:
        """Returns the condition, an expression of the kernel, that a sequence with `count` new rows has so
        few, at most 16, that attention divides its work along the sequence's pages; false for prompt rows.
        """
        return count <= (FEW if self.prompt is None else T.Select(self.prompt == 0, T.int32(FEW), T.int32(0)))

    def blocks(self, count: Expr) -> Expr:
        block = T.bind(self.block)
        return T.bind(T.truncdiv(count + block - 1, block))

    def parts(self, sequence: Expr, first: Expr, count: Expr) -> Expr:
        """Returns an expression of the kernel: the number of parts, of up to 16 KV cache pages each, into
        which attention divides the pages that `count` new rows (tokens) of a sequence attend to; 1 for
        prompt rows, or for more than 16 rows. first: index of the first row among the rows of the
        batch.
        """
        start, stop, _ = self.pages_seen(sequence, first, T.max(count, 1))
        return T.bind(T.Select(self.few(count), stop // PART - start // PART + 1, 1))


def plan(call: Call) -> Expr:
    """Emits code that divides the attention of a batch into tasks, the same for each KV head, and returns
    their number per KV head. It writes to call.plan, for each task, sequence, first row, number of rows,
    first page, last page (inclusive), position after the last token, and the index of its first partial
    result (-1: the task computes complete results); and to call.lines, for each sequence, the index of its
    first partial result and the number of parts of up to 16 pages into which its pages are divided. Such an
    index counts the results of all query heads of a row as one. The tables are in memory because LLVM would
    otherwise take many seconds to analyse which pages a task reads.
    """
    at = registers(1, 2, "int32")[0]
    for i in range(2):
        T.buffer_store(at, T.int32(0), [i])
    with T.serial(T.Cast("int32", call.batch)) as sequence:
        start = T.bind(call.q_indptr[sequence])
        rows = T.bind(call.q_indptr[sequence + 1] - start)
        parts = call.parts(sequence, start, rows)
        T.buffer_store(call.lines, at[1], [sequence, 0])
        T.buffer_store(call.lines, parts, [sequence, 1])
        T.buffer_store(at, at[1] + T.Select(call.few(rows), parts * rows, 0), [1])
    with T.serial(T.Cast("int32", call.batch)) as sequence:
        start = T.bind(call.q_indptr[sequence])
        rows = T.bind(call.q_indptr[sequence + 1] - start)
        line, parts = (T.bind(call.lines[sequence, i]) for i in range(2))
        few = T.bind(call.few(rows))
        lowest = T.bind(call.pages_seen(sequence, start, T.max(rows, 1))[0] // PART)
        with T.serial(call.blocks(rows)) as block, T.serial(parts) as part:
            size = T.bind(call.block)
            offset = T.bind(block * size)
            count = T.bind(T.min(size, rows - offset))
            oldest, newest, end = call.pages_seen(sequence, start + offset, count)
            edge = T.bind((lowest + part) * PART)
            begin = T.Select(few, T.max(oldest, edge), oldest)
            stop = T.Select(few, T.min(newest, edge + PART - 1), newest)
            partial_line = T.Select(few, line + part * rows + offset, -1)
            for i, value in enumerate((sequence, start + offset, count, begin, stop, end, partial_line)):
                T.buffer_store(call.plan, value, [at[0], i])
            T.buffer_store(at, at[0] + 1, [0])
    return T.bind(T.Cast("int64", at[0]))


def task_place(call: Call, rows: Expr, total: Expr, index: Expr) -> tuple[Expr, Expr]:
    """Returns (row of the task table, KV head) for attention task number `index`, one block of a sequence's
    rows for one KV head. With at most SHORT new rows per sequence and at least MANY_TASKS blocks, a block's
    tasks follow each other, since a page holds all KV heads; otherwise a KV head's tasks do, and early and
    late blocks alternate. rows: number of new rows; total: number of blocks."""
    heads = i64(call.spec.heads.kv)
    streamed = T.bind(T.And(total >= MANY_TASKS, rows <= call.batch * SHORT))
    number = T.Select(streamed, T.truncdiv(index, heads), folded(T.bind(T.truncmod(index, total)), total))
    return T.bind(number), T.bind(T.Select(streamed, T.truncmod(index, heads), T.truncdiv(index, total)))


def folded(index: Expr, blocks: Expr) -> Expr:
    """Returns entry `index` of the order 0, last, 1, last - 1, ... of `blocks` blocks. Later blocks of a
    sequence attend to more keys, so every run of indices that one core computes has early and late blocks."""
    half = T.bind(T.truncdiv(index, T.int64(2)))
    return T.Select(half * 2 == index, half, blocks - 1 - half)


def join(call: Call, sequence: Expr) -> None:
    """Emits the combination of the partial attention results of one sequence into `call.out`: out = sum of
    totals / sum of denominators over the parts of its pages, after scaling each part to the common maximum;
    an attention sink is added to the denominator. Sequences that were not divided into parts are skipped.
    """
    first = T.bind(call.q_indptr[sequence])
    count = T.bind(call.q_indptr[sequence + 1] - first)
    with T.If(call.few(count)), T.Then():
        line, parts = (T.bind(call.lines[sequence, i]) for i in range(2))
        with T.serial(count) as row, T.serial(call.spec.heads.query) as head:
            _join_row(call, (T.bind(line + row), count, parts), (first + row, head))


def _join_row(call: Call, lines: tuple[Expr, Expr, Expr], place: tuple[Expr, Expr]) -> None:
    """Emits code that combines the partial attention results of one row and query head, and stores the result
    in `call.out`. A record is the partial results of all query heads of a row over one part. lines: (index of
    the row's first record, distance to its next record in records, number of its records); place: (index of
    the row in the batch, query head).
    """
    (start, stride, parts), (row, head), heads = lines, place, call.spec.heads
    floats, scalar = call.spec.values, call.spec.values.scalar

    def at(part: Expr) -> Expr:
        return T.bind(T.Cast("int64", start + part * stride) * heads.query + head)

    best, total = (registers(1, 1)[0] for _ in range(2))
    T.buffer_store(best, T.float32(LOWEST), [0])
    with T.serial(parts) as part:
        T.buffer_store(best, T.max(best[0], call.highest[at(part)]), [0])
    highest = T.bind(best[0])
    T.buffer_store(total, T.float32(0.0), [0])
    column = T.bind(head * heads.value_dim)
    with T.serial(parts) as part:
        line = at(part)
        shrink = scalar.exp(call.highest[line] - highest)
        T.buffer_store(total, scalar.fma(call.denominator[line], shrink, total[0]), [0])
        with T.serial(heads.value_dim // floats.lanes) as k:
            value = floats.load(call.total, line, k * floats.lanes) * floats.spread(shrink)
            older = floats.load(call.out, row, column + k * floats.lanes)
            sums = T.Select(floats.spread(part > 0), value + older, value)
            floats.store(call.out, sums, row, column + k * floats.lanes)
    if call.sinks is not None:
        sink = scalar.exp(scalar.load(call.sinks, head) - highest)
        T.buffer_store(total, total[0] + sink, [0])
    share = T.bind(T.float32(1.0) / total[0])
    with T.serial(heads.value_dim // floats.lanes) as k:
        value = floats.load(call.out, row, column + k * floats.lanes) * floats.spread(share)
        floats.store(call.out, value, row, column + k * floats.lanes)


def alibi_bias(spec: AttentionKernel, slope: Expr, start: Expr, newest: Expr) -> Expr:
    """Returns the ALiBi biases, a float32 vector, of consecutive keys for one query vector: slope * (key -
    query) or, unless spec.alibi is "exact", bf16(slope * bf16(key)) * spec.scale, where softmax cancels the
    query. slope: that of the query's head; start: position of the first key; newest: that of the query."""
    floats = spec.scores
    slopes = floats.spread(slope)
    keys = T.ramp(start, 1, floats.lanes) if floats.lanes > 1 else start
    if spec.alibi == "exact":
        return slopes * floats.whole(keys - floats.spread(newest))
    # Rounded to bfloat16 as the models do: of a few thousand keys, neighbours have the same bias.
    numbers = T.bind(floats.rounded(floats.whole(keys)))
    return floats.rounded(slopes * numbers) * floats.constant(spec.scale)
