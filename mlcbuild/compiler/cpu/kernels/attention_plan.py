"""How attention is cut into tasks, and how the parts of a sequence are put together again."""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.cache import Heads
from mlcbuild.compiler.cpu.kernels.floats import Floats, registers
from mlcbuild.models import Alibi

PART = 8
"""Pages of a part: several microseconds of reading for each head, and many parts where they matter."""
FEW = 16
"""Rows of a sequence up to which it is cut along its pages: a token with its drafts, but no prompt."""
LOWEST = -1e30
"""What a maximum starts with."""
HIDDEN = -2e30
"""A hidden score: far below the first maximum, so it weighs next to nothing, not NaN."""
PAIR = 32
"""Query vectors that tile registers take together: two tiles of them."""
PROMPT_VECTORS = 192
"""Query vectors of a task on tile registers: they share what it costs to turn keys and values into tiles."""


@dataclass(frozen=True)
class AttentionKernel:
    """The shape of the kernel: how many vectors it keeps where."""

    isa: ISA
    heads: Heads
    scale: float
    softcap: float | None
    rounded: bool = False
    """Of prompts, queries, keys, values and weights may be rounded to bfloat16."""
    columns: int = 0
    """Of the tensor for results, if it has more than these take. Those of prompts then are put there as tiles
    for the product that follows."""
    alibi: Alibi | None = None
    sinks: str | None = None
    """Stored type of the sinks; None: there are none."""

    @property
    def has_prompt_variant(self) -> bool:
        """The kernel has a variant for rows of prompts, like those of products."""
        return self.rounded and self.isa.amx and self.heads.dim % 32 == 0 and not (self.alibi or self.sinks)

    @property
    def fallback(self) -> str | None:
        """Why prompts take a slower path than the processor has; None where they do not."""
        if not self.rounded or not self.isa.amx or self.has_prompt_variant:
            return None
        if self.alibi or self.sinks:
            return "scores have biases or sinks: prompts' rows are not rounded"
        return f"heads of {self.heads.dim} values are no whole tiles of 32: prompts' rows are not rounded"

    @property
    def registers(self) -> int:
        """Vector registers of the processor."""
        return 32 if self.isa.lanes == 16 or self.isa.name == "neon" else 16

    @property
    def scores(self) -> Floats:
        return Floats.dividing(self.isa, PAGE)

    @property
    def values(self) -> Floats:
        return Floats.dividing(self.isa, self.heads.dim)

    @property
    def tile(self) -> int:
        """Query vectors handled together: their scores of one page fill at most half the registers. Three,
        not four, where a group's heads then leave less of their last tile empty: in decoding there are no
        others."""
        most, group = max(1, min(4, self.registers * self.scores.lanes // (2 * PAGE))), self.heads.group
        return 3 if most == 4 and group > 2 and -group % 3 < -group % 4 else most

    @property
    def value_vectors(self) -> int:
        """Vectors of each output row that are kept in registers at a time; divides a row."""
        limit = max(1, self.registers // (2 * self.tile))
        whole = self.heads.dim // self.values.lanes
        return max(count for count in range(1, limit + 1) if whole % count == 0)

    @property
    def block(self) -> int:
        """Rows of one sequence in a task: about 32 query vectors, which stay in the first-level cache."""
        return max(1, 32 // self.heads.group)

    @property
    def capacity(self) -> int:
        """Query vectors a task has room for: whole tiles."""
        return -(-self.block * self.heads.group // self.tile) * self.tile

    @property
    def prompt_block(self) -> int:
        """Rows of a prompt in a task on tile registers."""
        return max(1, PROMPT_VECTORS // self.heads.group)

    @property
    def prompt_capacity(self) -> int:
        return -(-self.prompt_block * self.heads.group // PAIR) * PAIR


@dataclass(frozen=True)
class Call:
    """The arguments of the kernel, and room for what parts of a sequence find, one line for each part, row
    and query head."""

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
    """Not 0 where tile registers take all rows; None where there are none."""
    slopes: Buffer | None  # float32 [heads], of ALiBi
    sinks: Buffer | None  # [heads]
    out: Buffer
    total: Buffer  # [lines, dim]
    denominator: Buffer  # [lines]
    highest: Buffer  # [lines]
    plan: Buffer  # int32 [tasks, 7]: sequence, first row, rows, first page, last page, end, line or -1
    lines: Buffer  # int32 [b, 2]: first line and number of parts of each sequence

    def pages_seen(self, sequence: Expr, first: Expr, count: Expr) -> tuple[Expr, Expr, Expr]:
        """First and last page that `count` > 0 rows from `first` on look at, and the end of what they see."""
        end = T.bind(T.min(self.positions[first + count - 1] + 1, self.kv_lengths[sequence]))
        oldest = T.max(T.Cast("int64", self.positions[first]) - self.window + 1, T.int64(0))
        return T.bind(T.Cast("int32", oldest) // PAGE), T.bind((end - 1) // PAGE), end

    @property
    def block(self) -> Expr:
        """Rows of a task."""
        few, many = T.int32(self.spec.block), T.int32(self.spec.prompt_block)
        return few if self.prompt is None else T.Select(self.prompt == 0, few, many)

    def few(self, count: Expr) -> Expr:
        """A sequence with so many rows is cut along its pages."""
        return count <= (FEW if self.prompt is None else T.Select(self.prompt == 0, T.int32(FEW), T.int32(0)))

    def blocks(self, count: Expr) -> Expr:
        block = T.bind(self.block)
        return T.bind(T.truncdiv(count + block - 1, block))

    def parts(self, sequence: Expr, first: Expr, count: Expr) -> Expr:
        """Parts along the pages that each block of a sequence is cut into; 1 where there are many rows."""
        start, stop, _ = self.pages_seen(sequence, first, T.max(count, 1))
        return T.bind(T.Select(self.few(count), stop // PART - start // PART + 1, 1))


def plan(call: Call) -> Expr:
    """Fill the tables; returns the number of tasks. Through memory, because LLVM takes many seconds to see
    through what a task's pages are."""
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
            offset = T.bind(block * call.block)
            count = T.bind(T.min(call.block, rows - offset))
            oldest, newest, end = call.pages_seen(sequence, start + offset, count)
            edge = T.bind((lowest + part) * PART)
            begin = T.Select(few, T.max(oldest, edge), oldest)
            stop = T.Select(few, T.min(newest, edge + PART - 1), newest)
            kept = T.Select(few, line + part * rows + offset, -1)
            for i, value in enumerate((sequence, start + offset, count, begin, stop, end, kept)):
                T.buffer_store(call.plan, value, [at[0], i])
            T.buffer_store(at, at[0] + 1, [0])
    return T.bind(T.Cast("int64", at[0]))


def join(call: Call, sequence: Expr) -> None:
    """out = sum of totals / sum of denominators over the parts of a sequence, each set to one maximum."""
    first = T.bind(call.q_indptr[sequence])
    count = T.bind(call.q_indptr[sequence + 1] - first)
    with T.If(call.few(count)), T.Then():
        line, parts = (T.bind(call.lines[sequence, i]) for i in range(2))
        with T.serial(count) as row, T.serial(call.spec.heads.query) as head:
            _join_row(call, (T.bind(line + row), count, parts), (first + row, head))


def _join_row(call: Call, lines: tuple[Expr, Expr, Expr], place: tuple[Expr, Expr]) -> None:
    """lines = (first line, lines from part to part, parts); place = (row, query head)."""
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
    column = T.bind(head * heads.dim)
    with T.serial(parts) as part:
        line = at(part)
        shrink = scalar.exp(call.highest[line] - highest)
        T.buffer_store(total, scalar.fma(call.denominator[line], shrink, total[0]), [0])
        with T.serial(heads.dim // floats.lanes) as k:
            value = floats.load(call.total, line, k * floats.lanes) * floats.spread(shrink)
            older = floats.load(call.out, row, column + k * floats.lanes)
            sums = T.Select(floats.spread(part > 0), value + older, value)
            floats.store(call.out, sums, row, column + k * floats.lanes)
    if call.sinks is not None:
        sink = scalar.exp(scalar.load(call.sinks, head) - highest)
        T.buffer_store(total, total[0] + sink, [0])
    share = T.bind(T.float32(1.0) / total[0])
    with T.serial(heads.dim // floats.lanes) as k:
        value = floats.load(call.out, row, column + k * floats.lanes) * floats.spread(share)
        floats.store(call.out, value, row, column + k * floats.lanes)
