"""x @ W.T for many rows of x on x86 tile registers (AMX), with products of bfloat16 summed in float32.

A tile register holds 16 rows of 64 bytes. One instruction multiplies a tile of x (16 rows, 32 values of k)
with a tile of weights (32 values of k, 16 columns) in 16 cycles, which is four times what int8 dot products
do on vectors, and there is no work for scales: they are part of the weights. x and the weights are brought
into bfloat16 tiles first, x once, the weights a panel of columns at a time, to be used for all rows.

A panel of weights, as much of k as fits, stays in the second-level cache. A block of x, which is used for
all columns of the panel, stays in the first, because tiles of weights are loaded past it (tileloaddt1); where
k is long, it is cut for that. The next part of x, and the place of results, are fetched meanwhile. Of a
matrix of gates and ups, tiles of both are computed side by side, and only what the gate makes of them is
written, as tiles of x for the product after it: a quarter of the bytes.

Order of k: value i of a step of 32 shares a lane with value 16 + i, as the nibbles of the x16 layout do.
Weights of that layout become tiles in amx_weights.py.
Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.kernels.output import Output
from mlcbuild.compiler.kernels.vectors import (
    f32,
    i32,
    i64,
    odd_lines,
    prefetch,
    span,
    splat,
    typed,
)

LANES = 16
"""Rows of a tile, and int32 or float32 values in one."""
STEP = 32
"""Values of k in a tile."""
BLOCK = 32
"""Rows and columns that are computed together: four tiles of sums, two of x, two of weights."""
PANEL = 288
"""Columns that are computed for all rows by one thread, at most."""
CHUNK = 512
"""Rows of a task, at most: their sums take half a MiB."""
BLOCK_STEPS = 18
"""Steps of k after which sums go to memory: a block of x then takes 36 KiB of a first-level cache of 48."""
HELD = 5 << 18
"""Bytes of weights that a panel has at hand, at most: five eighths of a second-level cache."""
X_EXPONENT = 104
"""Power of two that x is multiplied by; see amx_weights."""

Ready = Callable[[Expr], tuple[Buffer, Expr]]
"""ready(row) emits what makes a row of x: the buffer where it is float32, and its row there."""
Unpack = Callable[[Buffer, tuple[Expr, Expr], Expr, Expr], None]
"""unpack(buffer, place, tile, step) emits the stores of a tile of weights, 2**-X_EXPONENT of them: for each
line an int32x16, one lane for each of 16 columns, at buffer[(*place, line, lanes)]."""


@dataclass(frozen=True)
class Shape:
    """Of a matrix [n, k], and how it is cut."""

    n: int
    k: int
    gated: bool = False
    """The matrix is gates, then as many ups: tiles of both are computed together."""

    @property
    def steps(self) -> int:
        return -(-self.k // STEP)

    @property
    def passes(self) -> int:
        """Parts of k whose weights are at hand one after the other. Sums wait in memory meanwhile."""
        return -(-self.steps * self.width * 64 // HELD)

    @property
    def pass_steps(self) -> int:
        """Steps of a pass, all being of nearly equal size."""
        return -(-self.steps // self.passes)

    @property
    def blocks(self) -> int:
        """Blocks of k in a pass."""
        return -(-self.pass_steps // BLOCK_STEPS)

    @property
    def block_steps(self) -> int:
        """Steps of a block of k, all blocks being of nearly equal size."""
        return -(-self.pass_steps // self.blocks)

    @property
    def whole(self) -> bool:
        """Sums are done with k at once."""
        return self.passes * self.blocks == 1

    @property
    def unit(self) -> int:
        """Columns that stay together, as they make a block of results, or a step of the next product."""
        return 2 * STEP if self.gated else BLOCK

    @property
    def units(self) -> int:
        return -(-self.n // self.unit)

    @property
    def width(self) -> int:
        """Columns of the widest panel."""
        return min(PANEL // self.unit, self.units) * self.unit

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the widest panel."""
        return self.width // LANES

    def panels(self) -> Expr:
        """As many panels for each thread as are needed: x is read once for each."""
        threads = T.Cast("int64", T.call_packed("runtime.NumThreads"))
        each = (self.units * self.unit - 1) // (threads * self.width) + 1
        return T.bind(T.min(T.bind(threads * each), i64(self.units)))

    def panel(self, number: Expr, panels: Expr) -> tuple[Expr, Expr]:
        """First unit of a panel, and how many; panels are of nearly equal size."""
        first, after = ((number + i) * self.units // panels for i in range(2))
        return T.bind(first), T.bind(after - first)

    @property
    def sums(self) -> tuple[int, int]:
        """Rows and columns of a thread's sums: of two blocks side by side, if it is done with k at once."""
        return CHUNK if self.passes > 1 else BLOCK, odd_lines(2 * BLOCK if self.whole else self.width)

    @property
    def ahead(self) -> int:
        """Lines of x that each pair of tiles fetches at a step, a power of two; a panel's fetch a block's."""
        return 1 << (-(-BLOCK // (self.tiles // 2)) - 1).bit_length()

    def tile(self, column: Expr, number: Expr) -> Expr:
        """The tile of the matrix that is the `number`-th of a panel from `column` on."""
        if not self.gated:
            return T.min(column // LANES + number, i64(-(-self.n // LANES) - 1))
        up, place = T.truncmod(number, i64(2)), T.truncdiv(number, i64(2))
        return up * (self.n // (2 * LANES)) + column // (2 * LANES) + place


@dataclass(frozen=True)
class Packed:
    """Rows of x as tiles of bfloat16 pairs, lines of 64 bytes: of its own, int32 [rows / 16, steps, 16, 16],
    or inside of a float32 tensor, from its start."""

    buffer: Buffer
    strides: tuple[Expr, Expr] | None = None
    """Lines from 16 rows to the next 16, and from a step to the next."""

    @classmethod
    def inside(cls, pair: Buffer, k: int, m: Expr) -> Packed:
        """What is made of gate and up, kept where these would be, float32 [m, 2 * k]: tile after tile, or
        step after step where there is no room for whole tiles."""
        tiles = m >= BLOCK // 4
        strides = T.Select(tiles, i64(k // STEP * LANES), i64(LANES)), T.Select(tiles, i64(LANES), m)
        return cls(pair, (T.bind(strides[0]), T.bind(strides[1])))

    @staticmethod
    def fits(k: int) -> bool:
        """There is room, for any number of rows, and for reading a block from the last row on."""
        return k % STEP == 0 and k >= 352

    def line(self, row: Expr, step: Expr) -> tuple[Expr, ...]:
        """Where the line of a row starts."""
        tile, line = T.truncdiv(row, i64(LANES)), T.truncmod(row, i64(LANES))
        if self.strides is None:
            return tile, step, line, i64(0)
        return i64(0), (tile * self.strides[0] + step * self.strides[1] + line) * LANES

    def put(self, row: Expr, step: Expr, low: Expr, high: Expr) -> None:
        """Store the two halves of a line, float32x16."""
        factor = f32(2.0**X_EXPONENT, LANES)
        *place, start = self.line(row, step)
        bits = rounded(low * factor, high * factor)
        if self.strides is not None:
            bits = T.reinterpret(typed("float32", LANES), bits)
        T.buffer_store(self.buffer, bits, [*place, span(start, LANES)])


@dataclass(frozen=True)
class GatedOutput:
    """Takes the results of a gated shape: what `gate` makes of a gate and an up, as rows of x."""

    gate: Callable[[Expr, Expr], Expr]
    out: Packed


def product(shape: Shape, x: Packed, m: Expr, unpack: Unpack, output: Output | GatedOutput) -> None:
    """Emit: output = x [m, k] @ W.T, in chunks of rows and panels of columns that threads share out."""
    if isinstance(output, Output):
        output = replace(output, step=BLOCK)
    rows = T.bind((m + (BLOCK - 1)) // BLOCK * BLOCK)
    chunks = (rows + (CHUNK - 1)) // CHUNK
    panels = shape.panels()
    with T.parallel(0, chunks * panels) as task:
        chunk, panel = (T.bind(part(task, panels)) for part in (T.truncdiv, T.truncmod))
        start, units = shape.panel(panel, panels)
        column, pairs = T.bind(start * shape.unit), T.bind(units * (shape.unit // BLOCK))
        configure()
        weights = T.alloc_buffer((shape.tiles, shape.pass_steps, LANES, LANES), "int32")
        sums = T.alloc_buffer(shape.sums, "float32")
        with T.serial(0, i64(shape.passes)) as number:
            first = T.bind(number * shape.pass_steps)
            count = T.bind(T.min(i64(shape.pass_steps), shape.steps - first))
            with T.serial(0, pairs * 2) as tile, T.serial(0, count) as step:
                unpack(weights, (tile, step), shape.tile(column, tile), first + step)
            with T.serial(0, T.min(i64(CHUNK), rows - chunk * CHUNK) // BLOCK) as block:
                row = T.bind(chunk * CHUNK + block * BLOCK)
                last = T.bind(T.Select(number == shape.passes - 1, i64(1), i64(0)))
                given = _Operands(shape, x, row, first, weights, count, output, column, last)
                if shape.whole:
                    _at_once(given, sums, m, pairs)
                else:
                    held = i64(0) if shape.passes == 1 else T.bind(block * BLOCK)
                    _in_parts(given, sums, (held, number, pairs))
                    with T.If(number == shape.passes - 1), T.Then():
                        _finish(given, m, (sums, held), (i64(0), pairs * 2))
        instruction("tilerelease")


@dataclass(frozen=True)
class _Operands:
    """A block of rows of x and a panel of weights, the steps of k that are at hand, and where results go."""

    shape: Shape
    x: Packed
    row: Expr
    step: Expr
    weights: Buffer
    count: Expr
    output: Output | GatedOutput
    column: Expr
    last: Expr
    """1 in the last pass, after which results are written, and 0 before."""

    def fetch(self, pair: Expr, step: Expr) -> None:
        """At a step of a pair of tiles, ask for its share of what is used later: of x, and of the place of
        results."""
        shape = self.shape
        # Of x in parts, the next one. Where a block has all of k, the processor sees by itself what follows.
        for i in range(0 if shape.whole else shape.ahead):
            after = self.x.line(self.row + pair * shape.ahead + i, self.step + step + shape.block_steps)
            prefetch(self.x.buffer, after, locality=2)
        each = -(-BLOCK // shape.pass_steps)
        for i in range(each):
            line = T.min(step * each + i, i64(BLOCK - 1))
            row = self.row + (line if shape.passes == 1 else line * self.last)
            if isinstance(self.output, Output):
                for part in range(0, BLOCK, LANES):
                    place = (row, self.column + pair * BLOCK + part)
                    prefetch(self.output.buffer, place, write=True)
            else:
                place = self.output.out.line(row, T.truncdiv(self.column // BLOCK + pair, i64(2)))
                prefetch(self.output.out.buffer, place, write=True)


def _at_once(given: _Operands, sums: Buffer, m: Expr, pairs: Expr) -> None:
    """A block of rows, all of k. Sums that are used up right away leave the first-level cache to x."""
    with T.serial(0, (pairs + 1) // 2) as two:
        with T.serial(0, T.min(i64(2), pairs - two * 2)) as i:
            _block(given, two * 2 + i, (i64(0), given.count), (sums, i64(0), i * BLOCK), None)
        tiles = T.min(i64(4), (pairs - two * 2) * 2)
        _finish(given, m, (sums, i64(0)), (two * (2 * BLOCK), tiles))


def _in_parts(given: _Operands, sums: Buffer, place: tuple[Expr, Expr, Expr]) -> None:
    """A block of rows, a block of k after the other; place = (row of sums, pass, pairs of tiles)."""
    (held, number, pairs), shape = place, given.shape
    with T.serial(0, i64(shape.blocks)) as part, T.serial(0, pairs) as pair:
        start = T.bind(part * shape.block_steps)
        steps = start, T.max(T.min(i64(shape.block_steps), given.count - start), i64(0))
        _block(given, pair, steps, (sums, held, pair * BLOCK), T.And(number == 0, part == 0))


def _block(
    given: _Operands,
    pair: Expr,
    steps: tuple[Expr, Expr],
    target: tuple[Buffer, Expr, Expr],
    fresh: Expr | None,
) -> None:
    """sums += x . weights, for a block of rows and a pair of tiles of columns, of `steps` (first, count) that
    are at hand; target = (sums, row, column), which start with zero if `fresh`, or always where it is
    None."""
    sums, *place = target
    corners = [(place[0] + i * LANES, place[1] + j * LANES) for i in range(2) for j in range(2)]
    stride = 4 * int(sums.shape[1])
    with T.If(T.bool(True) if fresh is None else fresh):
        with T.Then():
            for number, _ in enumerate(corners):
                instruction("tilezero", T.int8(number))
        if fresh is not None:
            with T.Else():
                for number, corner in enumerate(corners):
                    move("tileloadd64", number, sums, corner, stride)
    with T.serial(0, steps[1]) as index:
        step = steps[0] + index
        for j in range(2):
            move("tileloaddt164", 6 + j, given.weights, (pair * 2 + j, step, 0, 0), 64)
        given.fetch(pair, step)
        for i in range(2):
            line = given.x.line(given.row + i * LANES, given.step + step)
            move("tileloadd64", 4 + i, given.x.buffer, line, 64)
            for j in range(2):
                instruction("tdpbf16ps", T.int8(2 * i + j), T.int8(4 + i), T.int8(6 + j))
    for number, corner in enumerate(corners):
        move("tilestored64", number, sums, corner, stride)


def _finish(given: _Operands, m: Expr, held: tuple[Buffer, Expr], columns: tuple[Expr, Expr]) -> None:
    """Write a block of rows of a panel: sums and their first row, columns (first in the panel, tiles)."""
    (sums, first), (column, tiles), output = held, columns, given.output
    column = given.column + column
    with T.serial(0, T.min(i64(BLOCK), m - given.row)) as line:
        row = given.row + line
        if isinstance(output, Output):
            with T.serial(0, tiles) as tile:
                values = sums[first + line, span(tile * LANES, LANES)]
                output.store(row, column + tile * LANES, values, LANES, True)
            return
        with T.serial(0, tiles // 4) as step:
            found = [T.bind(sums[first + line, span((step * 4 + i) * LANES, LANES)]) for i in range(4)]
            low, high = (output.gate(found[i], found[i + 1]) for i in (0, 2))
            output.out.put(row, column // (2 * STEP) + step, low, high)


def pack(shape: Shape, ready: Ready, m: Expr) -> Packed:
    """Emit x float32 [m, k] as tiles. Rows after the last repeat it, and nothing of theirs is kept."""
    rows = T.bind((m + (BLOCK - 1)) // BLOCK * BLOCK)
    packed = Packed(T.alloc_buffer((rows // LANES, shape.steps, LANES, LANES), "int32"))
    with T.parallel(0, rows // LANES) as tile, T.serial(0, i64(LANES)) as line:
        place = T.bind(tile * LANES + line)
        x, row = ready(T.bind(T.min(place, m - 1)))
        with T.serial(0, i64(shape.k // STEP)) as step:
            packed.put(place, step, *(x[row, span(step * STEP + half, LANES)] for half in (0, LANES)))
        if shape.k % STEP:
            start, tail = shape.k // STEP * STEP, T.alloc_buffer((STEP,), "float32")
            for half in (0, LANES):
                T.buffer_store(tail, f32(0, LANES), [span(half, LANES)])
            with T.serial(0, i64(shape.k % STEP)) as i:
                T.buffer_store(tail, x[row, start + i], [i])
            packed.put(place, i64(shape.steps - 1), *(tail[span(half, LANES)] for half in (0, LANES)))
    return packed


def rounded(low: Expr, high: Expr) -> Expr:
    """Two vectors of float32 rounded to bfloat16, as the low and high halves of int32 lanes."""
    ints = typed("int32", LANES)
    first, second = (T.reinterpret(ints, half) + i32(0x8000, LANES) for half in (low, high))
    first = T.reinterpret(ints, T.reinterpret(typed("uint32", LANES), first) >> splat(T.uint32(16), LANES))
    return first | (second & i32(0xFFFF0000, LANES))


def configure() -> None:
    """Eight tiles of 16 rows of 64 bytes, for the thread that runs this."""
    config = T.alloc_buffer((16,), "int32")
    words = {0: 1, **dict.fromkeys(range(4, 8), 0x00400040), **dict.fromkeys((12, 13), 0x10101010)}
    for word in range(16):
        T.buffer_store(config, i32(words.get(word, 0)), [word])
    instruction("ldtilecfg", T.address_of(config[0]))


def move(name: str, number: int, buffer: Buffer, place: tuple[Expr | int, ...], stride: int) -> None:
    """Load or store a tile whose rows are `stride` bytes apart in memory."""
    instruction(name, T.int8(number), T.address_of(buffer[place]), i64(stride))


def instruction(name: str, *arguments: Expr) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))
