"""The product x @ W.T for many rows of x on x86 tile registers (AMX), in bfloat16 with float32 sums.

A tile register holds 16 rows of 64 bytes. One instruction multiplies a tile of x (16 rows, 32 values of k)
with a tile of weights (32 values of k, 16 columns) in 16 cycles, four times the rate of int8 dot products on
vectors, and scales cost nothing: they are part of the weights. x and the weights are converted to bfloat16
tiles first: x once, the weights (amx_weights.py) 32 columns at a time, to be used for all rows.

k is the dimension that is summed; a step is 32 values of it. Two tiles of columns, with as many steps as fit,
stay in the first-level cache while they are multiplied with all rows of x of a thread; tiles of x are loaded
past it (tileloaddt1) from the second level, where these rows stay. Threads split rows before columns: rows of
x then come from a thread's own cache, because the kernel that wrote them split them alike, and weights are
converted again for each chunk of rows, which costs less. Vector work is interleaved with tile instructions,
which leave most of a core idle: weights of one step are converted while the step before is multiplied, and
results of 32 rows are written while the next 32 are computed. Of a matrix of gates and ups, only act(gate) *
up is written, as tiles of x for the next product: a quarter of the bytes.

Order of k: value i of a step shares an int32 lane with value 16 + i, as two 4-bit codes share a stored byte.
Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.epilogue import Output
from mlcbuild.compiler.cpu.kernels.vectors import f32, i32, i64, opaque, span, splat, typed

LANES = 16
"""Number of rows in an AMX tile, and of int32 or float32 values in one row of it."""
STEP = 32
"""Number of values along k, the dimension that is summed, in an AMX tile of bfloat16."""
BLOCK = 32
"""Number of rows, and of columns, of the block of results that is computed at a time: four tiles of sums,
from two tiles of x and two of weights."""
PANEL = 576
"""Maximum result columns of which a thread keeps float32 sums in memory between passes over k. This limit
made a prompt of 512 tokens of TinyLlama's shape 1.4 % faster (`ci/bench/cpu`, two threads with AMX)."""
CHUNK = 512
"""Maximum number of rows of x that one thread multiplies at a time. Their part of x in one pass over k (18 *
32 values) then takes half a MiB, and their stored sums take 1 MiB."""
SHARE = 128
"""Minimum number of rows of x for each thread: with fewer, threads divide columns, too, because each converts
weights to tiles. It made 256 tokens of SmolLM2-135M 3 % faster (`ci/bench/cpu`, two threads)."""
PASS_STEPS = 18
"""Maximum number of steps (32 values of k, the summed dimension) in one pass of an AMX product over k. The
tiles of 32 columns of weights then take 36 KiB of a first-level cache of 48 KiB."""
X_EXPONENT = 104
"""Base-2 exponent of the factor by which x, the left factor of a product, is multiplied. It cancels the
factor 2**-104 of the weights in tiles, whose float16 bits are shifted into bfloat16."""

Ready = Callable[[Expr], tuple[Buffer, Expr]]
"""Function (index of a row) that emits the computation of this row of activations x, and returns (buffer that
holds the row as float32, index of the row in that buffer)."""
Unpack = Callable[[Buffer, tuple[Expr, Expr], Expr, Expr], None]
"""Function (buffer, place, tile, step) that emits the conversion of weights to bfloat16, times 2**-104: the
tile of result columns from 16 * tile on and of the values of k, the summed dimension, from 32 * step on. The
emitted code writes to buffer[place], int32 [16, 16], two numbers in each int32."""


@dataclass(frozen=True)
class Shape:
    """The shape of a weight matrix [n, k], and how an AMX product divides it: k into passes, result columns
    into panels (the columns of one thread), and both into tiles."""

    n: int
    k: int
    gated: bool = False
    """True for a matrix that holds the rows of the gate projection followed by as many rows of the up
    projection. Tiles of both are then computed together."""

    @property
    def steps(self) -> int:
        return -(-self.k // STEP)

    @property
    def passes(self) -> int:
        """Returns the number of passes over k, the summed dimension. Sums stay in memory between passes."""
        return -(-self.steps // PASS_STEPS)

    @property
    def pass_steps(self) -> int:
        """Returns the number of steps (32 values of k) in the longest pass over a part of k."""
        return -(-self.steps // self.passes)

    @property
    def lines(self) -> int:
        """Returns the number of rows of a finished 32 x 32 block of results that are written in each step (32
        values of k) of the next block, so that even the pass over k with the fewest steps writes all 32."""
        return -(-BLOCK // (self.steps // self.passes))

    @property
    def unit(self) -> int:
        """Returns the minimum number of adjacent result columns of a thread: 32, or 64 for a matrix of gate
        and up projections, whose 64 columns become 32 columns of act(gate) * up."""
        return 2 * STEP if self.gated else BLOCK

    @property
    def units(self) -> int:
        return -(-self.n // self.unit)

    @property
    def width(self) -> int:
        """Returns the maximum number of columns of a panel: all, or about PANEL if k takes several passes."""
        return (self.units if self.passes == 1 else min(PANEL // self.unit, self.units)) * self.unit

    def panels(self, threads: Expr) -> Expr:
        """Returns the number of panels (ranges of result columns) into which a product is divided: a multiple
        of `threads`, but at most one for each `unit` columns. All of x is read once per panel."""
        each = T.truncdiv(i64(self.units * self.unit - 1), threads * self.width) + 1
        return opaque(T.min(T.bind(threads * each), i64(self.units)))

    def sums_at(self, pair: Expr, block: Expr) -> Expr:
        """Returns the row, in a thread's buffer of sums float32 [.., 32], at which a 32 x 32 block of results
        starts. pair, block: numbers of the block's 32 columns and 32 rows among the thread's. If k is not
        divided into passes, blocks use two places in turn: one is written while the next is computed."""
        if self.passes == 1:
            return T.truncmod(block, i64(2)) * BLOCK
        return (pair * (CHUNK // BLOCK) + block) * BLOCK

    @property
    def sums(self) -> int:
        """Returns the number of rows, of 32 float32 sums each, of a thread's buffer for its sums."""
        return 2 * BLOCK if self.passes == 1 else self.width // BLOCK * CHUNK

    def tile(self, column: Expr, number: Expr) -> Expr:
        """Returns the index of one tile of a panel among the weight matrix's tiles of 16 result columns.
        column: the panel's first of all n columns; number: the tile's number in the panel, from 0. With gate
        and up projections, even numbers are tiles of gates, odd ones tiles of the ups of the same columns."""
        if not self.gated:
            return T.min(T.truncdiv(column, i64(LANES)) + number, i64(-(-self.n // LANES) - 1))
        up, place = T.truncmod(number, i64(2)), T.truncdiv(number, i64(2))
        return up * (self.n // (2 * LANES)) + T.truncdiv(column, i64(2 * LANES)) + place


@dataclass(frozen=True)
class Packed:
    """Rows of x, the left factor of a product, as AMX tiles of 16 rows and 32 bfloat16 values of k: an int32
    buffer [rows / 16, k / 32, 16, 16] or, if `strides` is not None, tiles inside a float32 tensor."""

    buffer: Buffer
    strides: tuple[Expr, Expr] | None = None
    """Distances of AMX tiles at the start of a float32 tensor, in lines of 64 bytes (a tile row each): (from
    a block of 16 rows to the next, from 32 values of k to the next). None: tiles fill an int32 buffer."""

    @classmethod
    def inside(cls, pair: Buffer, k: int, m: Expr) -> Packed:
        """Returns the buffer and strides (`Packed`) with which act(gate) * up is stored as AMX tiles at the
        start of `pair`, the float32 tensor [m, 2 * k] that first holds gates and ups. If m < 8, whole tiles
        do not fit, and 32 values of k take m lines of 64 bytes, one for each row."""
        tiles = m >= BLOCK // 4
        strides = T.Select(tiles, i64(k // STEP * LANES), i64(LANES)), T.Select(tiles, i64(LANES), m)
        return cls(pair, (T.bind(strides[0]), T.bind(strides[1])))

    @staticmethod
    def fits(k: int) -> bool:
        """Returns True if act(gate) * up with k columns, as AMX tiles of bfloat16, fits into the float32
        tensor [m, 2 * k] of its gates and ups for any number of rows m."""
        return k % STEP == 0 and k >= 352

    def line(self, row: Expr, step: Expr) -> tuple[Expr, ...]:
        """Returns the indices, one per dimension of the buffer that holds x as AMX tiles, of the first of the
        16 words (4 bytes each) with 32 bfloat16 values of row `row`: columns 32 * step to 32 * step + 31."""
        tile, line = T.truncdiv(row, i64(LANES)), T.truncmod(row, i64(LANES))
        if self.strides is None:
            return tile, step, line, i64(0)
        return i64(0), (tile * self.strides[0] + step * self.strides[1] + line) * LANES

    def put(self, row: Expr, step: Expr, low: Expr, high: Expr) -> None:
        """Emits stores of 32 values of a row of x, columns 32 * step to 32 * step + 31, into AMX tiles, as
        bfloat16 times 2**X_EXPONENT. low, high: the first and the last 16 of the values, float32x16 each."""
        factor = f32(2.0**X_EXPONENT, LANES)
        *place, start = self.line(row, step)
        bits = rounded(low * factor, high * factor)
        if self.strides is not None:
            bits = T.reinterpret(typed("float32", LANES), bits)
        T.buffer_store(self.buffer, bits, [*place, span(start, LANES)])


@dataclass(frozen=True)
class GatedOutput:
    """Turns the results of a product with gate and up projections into the input of the next product: `gate`
    returns act(gate) * up for vectors of gates and ups, `out` receives the rows as AMX tiles."""

    gate: Callable[[Expr, Expr], Expr]
    out: Packed


def product(shape: Shape, x: Packed, m: Expr, unpack: Unpack, output: Output | GatedOutput) -> None:
    """Emits output = x @ W.T on AMX tile registers; chunks of rows and panels of columns are divided among
    the threads. x: [m, k] as AMX tiles; unpack: emits the conversion of one tile of weights."""
    if isinstance(output, Output):
        output = replace(output, step=BLOCK)
    all_blocks = opaque(T.truncdiv(m + (BLOCK - 1), i64(BLOCK)))
    threads = opaque(T.Cast("int64", T.call_packed("runtime.NumThreads")))
    chunks = T.bind(T.min(threads, T.truncdiv(all_blocks, i64(SHARE // BLOCK))))
    chunks = opaque(T.max(chunks, T.truncdiv(all_blocks + (CHUNK // BLOCK - 1), i64(CHUNK // BLOCK))))
    panels = shape.panels(threads)
    with T.parallel(0, chunks * panels) as index:
        chunk, panel = (T.bind(part(index, panels)) for part in (T.truncdiv, T.truncmod))
        first, blocks = _part(chunk, chunks, all_blocks)
        start, units = _part(panel, panels, i64(shape.units))
        configure()
        task = _Task(
            shape,
            x,
            output,
            unpack,
            rows=(first * BLOCK, T.bind(T.min(m - first * BLOCK, blocks * BLOCK))),
            column=T.bind(start * shape.unit),
            weights=T.alloc_buffer((2, shape.pass_steps, LANES, LANES), "int32"),
            sums=T.alloc_buffer((shape.sums, BLOCK), "float32"),
            halves=T.alloc_buffer((CHUNK if shape.gated else 1, LANES), "float32"),
        )
        with T.serial(0, i64(shape.passes)) as number, T.serial(0, units * (shape.unit // BLOCK)) as pair:
            _pair(task, number, pair, blocks)
        instruction("tilerelease")


def _part(number: Expr, parts: Expr, total: Expr) -> tuple[Expr, Expr]:
    """Returns (first item, number of items) of part `number`, counted from 0, when `total` items are divided
    into `parts` parts of nearly equal size."""
    first, after = (T.truncdiv((number + i) * total, parts) for i in range(2))
    return opaque(first), opaque(after - first)


@dataclass(frozen=True)
class _Task:
    """The rows and columns of a product that one thread computes, and its scratch memory."""

    shape: Shape
    x: Packed
    output: Output | GatedOutput
    unpack: Unpack
    rows: tuple[Expr, Expr]
    """(index of the first row of x, number of rows of x) that one thread multiplies."""
    column: Expr
    """Index of the first column of the result that one thread computes."""
    weights: Buffer  # int32 [2, pass_steps, 16, 16]
    sums: Buffer  # float32 [shape.sums, 32]
    halves: Buffer  # float32 [CHUNK, 16]: the gated values of the first half of a step of the next product


@dataclass(frozen=True)
class _Pair:
    """The code generator for one pass over a range of k, the summed dimension, for two AMX weight tiles."""

    task: _Task
    number: Expr
    first: Expr
    """Index of the first step (32 values of k, the summed dimension) in this pass over k."""
    count: Expr
    last: Expr
    """Condition of the last pass over k, the summed dimension: the product's sums are then complete."""
    tiles: tuple[Expr, Expr]
    """Indices (see Shape.tile) of two tiles of 16 result columns, multiplied with the same tiles of x."""

    def bring(self, step: Expr) -> None:
        """Emits the conversion of the weights of a step, counted from the start of the pass, to two tiles."""
        task = self.task
        with T.unroll(0, i64(2)) as j:  # LLVM's -O2 leaves the loop alone, and prompts take 4 % longer.
            tile = opaque(self.tiles[0] + j * (self.tiles[1] - self.tiles[0]))
            task.unpack(task.weights, (j, step), tile, self.first + step)


def _pair(task: _Task, part: Expr, number: Expr, blocks: Expr) -> None:
    """Emits one pass over a range of k, the summed dimension, for a pair of weight tiles: the code adds their
    products with all rows of x to the sums. part: index of the pass; number: index of the pair of tiles;
    blocks: number of blocks of 32 rows of x."""
    shape = task.shape
    first, count = _part(part, i64(shape.passes), i64(shape.steps))
    low, high = (opaque(shape.tile(task.column, number * 2 + j)) for j in range(2))
    pair = _Pair(task, number, first, count, T.bind(part == shape.passes - 1), (low, high))
    pair.bring(i64(0))
    with T.serial(0, blocks) as block:
        _block(pair, block, None if shape.passes == 1 else part == 0)
    with T.If(pair.last), T.Then(), T.serial(0, task.rows[1] - (blocks - 1) * BLOCK) as line:
        _finish(pair, blocks - 1, line)


def _block(pair: _Pair, block: Expr, fresh: Expr | None) -> None:
    """Emits code that adds the products of 32 rows of x (`block`) with two tiles of weights to a thread's
    sums. fresh: condition under which sums start at zero; None: always. For the first block the code also
    converts weights to tiles, for later ones, in the last pass, it writes the results of the block before."""
    task = pair.task
    row, held = T.bind(task.rows[0] + block * BLOCK), T.bind(task.shape.sums_at(pair.number, block))
    ready = T.bind(T.Select(T.And(pair.last, block > 0), i64(BLOCK), i64(0)))
    brought = T.bind(T.Select(block == 0, pair.count - 1, i64(0)))
    _start(task.sums, held, fresh)
    with T.serial(0, pair.count) as step:
        with T.If(step < brought), T.Then():
            pair.bring(step + 1)
        for j in range(2):
            move("tileloadd64", 6 + j, task.weights, (i64(j), step, 0, 0), 64)
        for i in range(2):
            move("tileloaddt164", 4 + i, task.x.buffer, task.x.line(row + i * LANES, pair.first + step), 64)
            for j in range(2):
                instruction("tdpbf16ps", T.int8(2 * i + j), T.int8(4 + i), T.int8(6 + j))
        with T.serial(0, i64(task.shape.lines)) as i:
            line = T.bind(step * task.shape.lines + i)
            with T.If(line < ready), T.Then():
                _finish(pair, block - 1, line)
    for number, corner in enumerate(_corners(held)):
        move("tilestored64", number, task.sums, corner, 4 * BLOCK)


def _start(sums: Buffer, line: Expr, fresh: Expr | None) -> None:
    """Emits code that fills the four tile registers of sums with zeros if `fresh` is true or None, or else
    loads the sums from memory. line: the first of the 32 rows of the buffer `sums` that hold them."""

    def zero() -> None:
        for number in range(4):
            instruction("tilezero", T.int8(number))

    if fresh is None:
        zero()
        return
    with T.If(fresh):
        with T.Then():
            zero()
        with T.Else():
            for number, corner in enumerate(_corners(line)):
                move("tileloadd64", number, sums, corner, 4 * BLOCK)


def _corners(line: Expr) -> list[tuple[Expr, Expr]]:
    """Returns the indices (row, column), in a thread's buffer of sums float32 [.., 32], at which the four 16
    x 16 tiles of a block of 32 x 32 results start. line: the block's first row in that buffer."""
    return [(line + i * LANES, i64(j * LANES)) for i in range(2) for j in range(2)]


def _finish(pair: _Pair, block: Expr, line: Expr) -> None:
    """Emits code that writes one row of the finished sums of `pair`, two tiles of 16 columns, to the
    product's output: row `line` of the thread's `block` of 32 rows of x. For a GatedOutput the tiles are
    gates and ups; the 16 gated values of an even pair are stored together with those of the next pair."""
    task, output = pair.task, pair.task.output
    column, place = task.column + pair.number * BLOCK, block * BLOCK + line
    held = T.bind(task.shape.sums_at(pair.number, block) + line)
    values = [T.bind(task.sums[held, span(i * LANES, LANES)]) for i in range(2)]
    if isinstance(output, Output):
        for i, value in enumerate(values):
            output.store(task.rows[0] + place, column + i * LANES, value, LANES, True)
        return
    gated = T.bind(output.gate(*values))
    with T.If(T.truncmod(pair.number, i64(2)) == 0):
        with T.Then():
            T.buffer_store(task.halves, gated, [place, span(0, LANES)])
        with T.Else():
            step = T.truncdiv(column, i64(2 * STEP))
            output.out.put(task.rows[0] + place, step, task.halves[place, span(0, LANES)], gated)


def pack(shape: Shape, ready: Ready, m: Expr) -> Packed:
    """Emits code that packs x float32 [m, k], times 2**X_EXPONENT and padded with zeros along k, in bfloat16
    AMX tiles, and returns their buffer as a Packed. ready: function (row's index) that emits this row of x.
    The last row is repeated up to a multiple of 32 rows; results of repeated rows are dropped."""
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
    """Returns int32 lanes: float32 vectors `low`, `high`, rounded to bfloat16, in low and high halves."""
    ints = typed("int32", LANES)
    first, second = (T.reinterpret(ints, half) + i32(0x8000, LANES) for half in (low, high))
    first = T.reinterpret(ints, T.reinterpret(typed("uint32", LANES), first) >> splat(T.uint32(16), LANES))
    return first | (second & i32(0xFFFF0000, LANES))


def configure() -> None:
    """Emits the configuration of eight AMX tile registers of 16 rows x 64 bytes, for the executing thread."""
    config = T.alloc_buffer((16,), "int32")
    words = {0: 1, **dict.fromkeys(range(4, 8), 0x00400040), **dict.fromkeys((12, 13), 0x10101010)}
    for word in range(16):
        T.buffer_store(config, i32(words.get(word, 0)), [word])
    instruction("ldtilecfg", T.address_of(config[0]))


def move(name: str, number: int, buffer: Buffer, place: tuple[Expr | int, ...], stride: int) -> None:
    """Emits a load or store of AMX tile register `number`, whose rows are `stride` bytes apart in memory.
    name: the LLVM intrinsic; place: index of the tile's first element in `buffer`."""
    instruction(name, T.int8(number), T.address_of(buffer[place]), i64(stride))


def instruction(name: str, *arguments: Expr) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))
