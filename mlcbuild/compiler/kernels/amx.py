"""x @ W.T for many rows of x on x86 tile registers (AMX), with products of bfloat16 summed in float32.

A tile register holds 16 rows of 64 bytes. One instruction multiplies a tile of x (16 rows, 32 values of k)
with a tile of weights (32 values of k, 16 columns) in 16 cycles, which is four times what int8 dot products
do on vectors, and there is no work for scales: they are part of the weights. x and the weights are brought
into bfloat16 tiles first, x once, the weights a panel of columns at a time, to be used for all rows.

The blocks of x that are used again and again stay in the first-level cache, because tiles of weights are
loaded past it (tileloaddt1); the next block is fetched into the second level meanwhile. Of a matrix of gates
and ups, tiles of both are computed side by side, and only what the gate makes of them is written, as tiles of
x for the product after it: a quarter of the bytes.

Order of k: value i of a step of 32 shares a lane with value 16 + i, as the nibbles of the x16 layout do.
Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.kernels.output import Output
from mlcbuild.compiler.kernels.vectors import (
    f32,
    i32,
    i64,
    intrinsic,
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
PANEL = 256
"""Columns that are computed for all rows by one thread, at most."""
CHUNK = 512
"""Rows of a task, at most: their sums take half a MiB."""
BLOCK_STEPS = 18
"""Steps of k after which sums go to memory: a block of x then takes 36 KiB of a first-level cache of 48."""
X_EXPONENT, SCALE_EXPONENT = 104, 8
"""Powers of two that x and the scales of weights are multiplied by. The bits of a float16, shifted into the
places of a bfloat16, stand for 2**-112 of its value; 112 = 104 + 8. |x| may be up to 2**24, a scale 32."""
_CUT = 1.0 + 0.7213 * (7 / 16) / 128
"""What cutting three bits off a float16 takes from it, made up for: 7/16 of the last place that stays, which
is 1 / (2 ln 2) times 2**-7 of the value on the average over logarithms."""

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
    def blocks(self) -> int:
        """Blocks of k."""
        return -(-self.steps // BLOCK_STEPS)

    @property
    def block_steps(self) -> int:
        """Steps of a block of k, all blocks being of nearly equal size."""
        return -(-self.steps // self.blocks)

    @property
    def width(self) -> int:
        """Columns of a panel: eight equal panels or more, where columns are enough for that."""
        panels, whole = max(8, -(-self.n // PANEL)), 2 * STEP if self.gated else BLOCK
        return -(-self.n // (panels * whole)) * whole

    @property
    def panels(self) -> int:
        return -(-self.n // self.width)

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of a panel."""
        return self.width // LANES

    @property
    def sums(self) -> tuple[int, int]:
        """Rows and columns of a thread's sums: of two blocks side by side, if it is done with k at once."""
        return (BLOCK, odd_lines(2 * BLOCK)) if self.blocks == 1 else (CHUNK, odd_lines(self.width))

    @property
    def ahead(self) -> int:
        """Lines of x that each pair of tiles fetches ahead, a power of two; a panel's fetch a block's."""
        return 1 << (-(-BLOCK // (self.tiles // 2)) - 1).bit_length()

    def tile(self, panel: Expr, number: Expr) -> Expr:
        """The tile of the matrix that is the `number`-th of a panel."""
        if not self.gated:
            return T.min(panel * self.tiles + number, i64(-(-self.n // LANES) - 1))
        up, place = T.truncmod(number, i64(2)), T.truncdiv(number, i64(2))
        return up * (self.n // (2 * LANES)) + panel * (self.tiles // 2) + place

    def pairs(self, panel: Expr) -> Expr:
        """Pairs of tiles that a panel has."""
        left = (-(-self.n // LANES) - 1 - panel * self.tiles) // 2 + 1
        return T.bind(T.min(i64(self.tiles // 2), left))


@dataclass(frozen=True)
class Packed:
    """Rows of x as tiles of bfloat16 pairs, lines of 64 bytes: of its own, int32 [rows / 16, steps, 16, 16],
    or inside of a float32 tensor, [steps, stride, 16] from its start."""

    buffer: Buffer
    stride: Expr | None = None

    @classmethod
    def inside(cls, pair: Buffer, m: Expr) -> Packed:
        """What is made of gate and up, kept where these would be, float32 [m, 2 * k]. The stride is an odd
        multiple of half the lines of a first-level cache, so that a block of rows fits in there."""
        return cls(pair, T.bind(T.Select(m < 64, m, (m + 31) // 64 * 64 + 32)))

    @staticmethod
    def fits(k: int) -> bool:
        """There is room, for any number of rows, and for reading a block from the last row on."""
        return k % STEP == 0 and k >= 352

    def line(self, row: Expr, step: Expr) -> tuple[Expr, ...]:
        """Where the line of a row starts."""
        if self.stride is None:
            return T.truncdiv(row, i64(LANES)), step, T.truncmod(row, i64(LANES)), i64(0)
        return i64(0), (step * self.stride + row) * LANES

    def put(self, row: Expr, step: Expr, low: Expr, high: Expr) -> None:
        """Store the two halves of a line, float32x16."""
        factor = f32(2.0**X_EXPONENT, LANES)
        *place, start = self.line(row, step)
        bits = rounded(low * factor, high * factor)
        if self.stride is not None:
            bits = T.reinterpret(typed("float32", LANES), bits)
        T.buffer_store(self.buffer, bits, [*place, span(start, LANES)])


@dataclass(frozen=True)
class GatedOutput:
    """Takes the results of a gated shape: what `gate` makes of a gate and an up, as rows of x."""

    gate: Callable[[Expr, Expr], Expr]
    out: Packed


def workspace(shape: Shape, m: int) -> int:
    """Bytes that one call takes from the runtime's workspace pools for m rows of x, with one thread."""
    rows, columns = shape.sums
    tiles = -(-m // BLOCK) * BLOCK * shape.steps + shape.width * shape.block_steps
    return 64 * tiles + 4 * rows * columns


def product(shape: Shape, x: Packed, m: Expr, unpack: Unpack, output: Output | GatedOutput) -> None:
    """Emit: output = x [m, k] @ W.T, in chunks of rows and panels of columns that threads share out."""
    if isinstance(output, Output):
        output = replace(output, step=BLOCK)
    rows = T.bind((m + (BLOCK - 1)) // BLOCK * BLOCK)
    chunks = (rows + (CHUNK - 1)) // CHUNK
    with T.parallel(0, chunks * shape.panels) as task:
        chunk, panel = (T.bind(part(task, i64(shape.panels))) for part in (T.truncdiv, T.truncmod))
        configure()
        size = shape.block_steps
        weights = T.alloc_buffer((shape.tiles, size, LANES, LANES), "int32")
        sums = T.alloc_buffer(shape.sums, "float32")
        pairs = shape.pairs(panel)
        with T.serial(0, i64(shape.blocks)) as number:
            first = T.bind(number * size)
            count = T.bind(T.min(i64(size), shape.steps - first))
            with T.serial(0, pairs * 2) as tile, T.serial(0, count) as step:
                unpack(weights, (tile, step), shape.tile(panel, tile), first + step)
            with T.serial(0, T.min(i64(CHUNK), rows - chunk * CHUNK) // BLOCK) as block:
                row = T.bind(chunk * CHUNK + block * BLOCK)
                held = i64(0) if shape.blocks == 1 else T.bind(block * BLOCK)
                given = _Operands(x, row, first, weights, count, shape.ahead)
                if shape.blocks == 1:
                    # Sums that are used up right away leave the first-level cache to x.
                    with T.serial(0, (pairs + 1) // 2) as two:
                        with T.serial(0, T.min(i64(2), pairs - two * 2)) as i:
                            _block(given, two * 2 + i, sums, (held, i * BLOCK), None)
                        tiles = T.min(i64(4), (pairs - two * 2) * 2)
                        _finish(
                            output, (m, row), (sums, held), (panel * shape.width + two * (2 * BLOCK), tiles)
                        )
                else:
                    with T.serial(0, pairs) as pair:
                        _block(given, pair, sums, (held, pair * BLOCK), number == 0)
                    with T.If(number == shape.blocks - 1), T.Then():
                        _finish(output, (m, row), (sums, held), (panel * shape.width, pairs * 2))
        instruction("tilerelease")


@dataclass(frozen=True)
class _Operands:
    """Rows of x and a panel of weights, and the steps of k that are at hand."""

    x: Packed
    row: Expr
    step: Expr
    weights: Buffer
    count: Expr
    ahead: int
    """Lines of a step of the next block of rows that each pair of tiles asks for."""


def _block(given: _Operands, pair: Expr, sums: Buffer, place: tuple[Expr, Expr], fresh: Expr | None) -> None:
    """sums += x . weights, for a block of rows and a pair of tiles of columns, at `place`; sums start with
    zero if `fresh`, or always where it is None."""
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
    with T.serial(0, given.count) as step:
        for j in range(2):
            move("tileloaddt164", 6 + j, given.weights, (pair * 2 + j, step, 0, 0), 64)
        for i in range(given.ahead):
            after = given.x.line(given.row + BLOCK + pair * given.ahead + i, given.step + step)
            prefetch(given.x.buffer, after, locality=2)
        for i in range(2):
            line = given.x.line(given.row + i * LANES, given.step + step)
            move("tileloadd64", 4 + i, given.x.buffer, line, 64)
            for j in range(2):
                instruction("tdpbf16ps", T.int8(2 * i + j), T.int8(4 + i), T.int8(6 + j))
    for number, corner in enumerate(corners):
        move("tilestored64", number, sums, corner, stride)


def _finish(
    output: Output | GatedOutput,
    rows: tuple[Expr, Expr],
    held: tuple[Buffer, Expr],
    columns: tuple[Expr, Expr],
) -> None:
    """Write a block of rows of a panel: rows (m, first), sums and their first row, columns (first, tiles)."""
    (m, row), (sums, first), (column, tiles) = rows, held, columns
    with T.serial(0, T.min(i64(BLOCK), m - row)) as line:
        if isinstance(output, Output):
            with T.serial(0, tiles) as tile:
                values = sums[first + line, span(tile * LANES, LANES)]
                output.store(row + line, column + tile * LANES, values, LANES, True)
            return
        with T.serial(0, tiles // 4) as step:
            found = [T.bind(sums[first + line, span((step * 4 + i) * LANES, LANES)]) for i in range(4)]
            low, high = (output.gate(found[i], found[i + 1]) for i in (0, 2))
            output.out.put(row + line, column // (2 * STEP) + step, low, high)


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


def pair_scales(scales: Expr) -> Expr:
    """Scales float16x16 of 16 columns for `scaled`: float16x32, each twice."""
    wide = T.Cast(typed("float32", LANES), scales) * f32(_CUT * 2**SCALE_EXPONENT, LANES)
    bits = T.reinterpret(typed("int16", LANES), T.Cast(typed("float16", LANES), wide))
    lanes = T.bind(T.Cast(typed("int32", LANES), bits) & i32(0xFFFF, LANES))
    return T.bind(T.reinterpret("float16x32", lanes | (lanes << i32(16, LANES))))


def levels(lines: Sequence[Expr], bits: int, j: int, byte: int) -> Expr:
    """Pairs of float16 for a line of a tile of weights, from the int32x16 vectors of a group: the weights
    that a byte of quad j has and of quad 4 + j, less 2**(bits - 1)."""
    if bits == 8:
        return _bytes(lines[j], lines[4 + j], byte)
    fields = _fields(lines[j], 8 * byte)
    count = 2**bits
    if bits == 5:
        fifth = _fields(lines[4], 8 * byte + j - 4)
        fields = (fields & splat(T.int8(0x0F), 64)) | (fifth & splat(T.int8(0x10), 64))
    # Only the low five bits of an index count, so a table of 16 levels holds them twice.
    values = T.Cast("float16x32", (T.ramp(T.int32(0), 1, 32) & i32(count - 1, 32)) - i32(count // 2, 32))
    both = (T.reinterpret("int16x32", operand) for operand in (values, fields))
    return T.reinterpret("float16x32", intrinsic("int16x32", "llvm.x86.avx512.permvar.hi.512", *both))


def _fields(packed: Expr, start: int) -> Expr:
    """int8x64: of each int32 lane eight bits from `start` on, twice, and four bits later, twice. What is
    before or after a lane's bits is another's."""
    starts = [(32 * lane + start + 4 * half) % 64 for lane in (0, 1) for half in (0, 0, 1, 1)]
    control = splat(T.int64(int.from_bytes(bytes(starts), "little")), 8)
    given = (T.reinterpret("int8x64", operand) for operand in (control, packed))
    return intrinsic("int8x64", "llvm.x86.avx512.pmultishift.qb.512", *given)


def _bytes(low: Expr, high: Expr, byte: int) -> Expr:
    def moved(lanes: Expr, left: int) -> Expr:
        by = i32(abs(left), LANES)
        return lanes << by if left > 0 else lanes >> by if left < 0 else lanes

    lower, upper = moved(low, -8 * byte), moved(high, 16 - 8 * byte)
    pairs = (lower & i32(0xFF, LANES)) | (upper & i32(0xFF0000, LANES))
    return T.Cast("float16x32", T.reinterpret("int16x32", pairs) - splat(T.int16(128), 32))


def scaled(levels: Expr, scales: Expr) -> Expr:
    """Pairs of levels times their scales: a line of a tile of weights."""
    bits = T.reinterpret("int16x32", levels * scales)
    cut = (bits >> splat(T.int16(3), 32)) & splat(T.int16(0x8FFF - 0x10000), 32)
    return T.reinterpret(typed("int32", LANES), cut)


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
