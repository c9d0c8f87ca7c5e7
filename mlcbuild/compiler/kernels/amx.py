"""x @ W.T for many rows of x on x86 tile registers (AMX), with products of bfloat16 summed in float32.

A tile register holds 16 rows of 64 bytes. One instruction multiplies a tile of x (16 rows, 32 values of k)
with a tile of weights (32 values of k, 16 columns) in 16 cycles, which is four times what int8 dot products
do on vectors, and there is no work for scales: they are part of the weights. x and the weights are brought
into bfloat16 tiles first, x once, the weights a panel of columns at a time, to be used for all rows.

The blocks of x that are used again and again stay in the first-level cache, because tiles of weights are
loaded past it (tileloaddt1). Order of k: value i of a step of 32 shares a lane with value 16 + i, as the
nibbles of the x16 layout do. Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual,
volume 1, chapter 18.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.kernels.output import Output
from mlcbuild.compiler.kernels.vectors import f32, i32, i64, intrinsic, odd_lines, span, splat, typed

LANES = 16
"""Rows of a tile, and int32 or float32 values in one."""
STEP = 32
"""Values of k in a tile."""
BLOCK = 32
"""Rows and columns that are computed together: four tiles of sums, two of x, two of weights."""
PANEL = 256
"""Columns that are computed for all rows by one thread, at most."""
CHUNK = 512
"""Rows that share weights once they are unpacked, at most: their sums take half a MiB."""
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
        panels = max(8, -(-self.n // PANEL))
        return -(-self.n // (panels * BLOCK)) * BLOCK

    @property
    def panels(self) -> int:
        return -(-self.n // self.width)

    @property
    def sums(self) -> tuple[int, int]:
        """Rows and columns of a thread's sums: of one block of rows, if it is done with k at once."""
        return (BLOCK if self.blocks == 1 else CHUNK), odd_lines(self.width)


def workspace(shape: Shape, m: int) -> int:
    """Bytes that one call takes from the runtime's workspace pools for m rows of x, with one thread."""
    rows, columns = shape.sums
    tiles = -(-m // BLOCK) * BLOCK * shape.steps + shape.width * shape.block_steps
    return 64 * tiles + 4 * rows * columns


def product(shape: Shape, ready: Ready, m: Expr, unpack: Unpack, output: Output) -> None:
    """Emit: output = x float32 [m, k] @ W.T, in panels of columns that threads share out."""
    output = replace(output, step=shape.width)
    rows = T.bind((m + (BLOCK - 1)) // BLOCK * BLOCK)
    packed = T.alloc_buffer((rows // LANES, shape.steps, LANES, LANES), "int32")
    with T.parallel(0, rows // LANES) as tile:
        _pack(shape, ready, m, packed, tile)
    with T.parallel(0, i64(shape.panels)) as panel:
        _configure()
        tiles, size = shape.width // LANES, shape.block_steps
        weights = T.alloc_buffer((tiles, size, LANES, LANES), "int32")
        sums = T.alloc_buffer(shape.sums, "float32")
        last = -(-shape.n // LANES) - 1
        pairs = T.bind(T.min(i64(tiles // 2), (last - panel * tiles) // 2 + 1))
        with T.serial(0, (rows + (CHUNK - 1)) // CHUNK) as chunk, T.serial(0, i64(shape.blocks)) as number:
            first = T.bind(number * size)
            count = T.bind(T.min(i64(size), shape.steps - first))
            with T.serial(0, pairs * 2) as tile, T.serial(0, count) as step:
                unpack(weights, (tile, step), T.min(panel * tiles + tile, i64(last)), first + step)
            with T.serial(0, T.min(i64(CHUNK), rows - chunk * CHUNK) // BLOCK) as block:
                row = T.bind(chunk * CHUNK + block * BLOCK)
                held = i64(0) if shape.blocks == 1 else T.bind(block * BLOCK)
                with T.serial(0, pairs) as pair:
                    operands = _Operands(packed, row // LANES, first, weights, pair * 2)
                    _block(operands, count, sums, (held, pair * BLOCK), number == 0)
                with T.If(number == shape.blocks - 1), T.Then():
                    _finish(output, (m, row), (sums, held), (panel * shape.width, pairs * 2))
        _tile("tilerelease")


@dataclass(frozen=True)
class _Operands:
    """Where the tiles of a block start."""

    x: Buffer
    row_tile: Expr
    step: Expr
    weights: Buffer
    column_tile: Expr


def _block(given: _Operands, count: Expr, sums: Buffer, place: tuple[Expr, Expr], fresh: Expr) -> None:
    """sums += `count` steps, for a block of rows and columns at `place`; `fresh`: sums start with zero."""
    corners = [(place[0] + i * LANES, place[1] + j * LANES) for i in range(2) for j in range(2)]
    stride = 4 * int(sums.shape[1])
    with T.If(fresh):
        with T.Then():
            for number, _ in enumerate(corners):
                _tile("tilezero", T.int8(number))
        with T.Else():
            for number, corner in enumerate(corners):
                _move("tileloadd64", number, sums, corner, stride)
    with T.serial(0, count) as step:
        for j in range(2):
            _move("tileloaddt164", 6 + j, given.weights, (given.column_tile + j, step, 0, 0), 64)
        for i in range(2):
            _move("tileloadd64", 4 + i, given.x, (given.row_tile + i, given.step + step, 0, 0), 64)
            for j in range(2):
                _tile("tdpbf16ps", T.int8(2 * i + j), T.int8(4 + i), T.int8(6 + j))
    for number, corner in enumerate(corners):
        _move("tilestored64", number, sums, corner, stride)


def _finish(
    output: Output, rows: tuple[Expr, Expr], held: tuple[Buffer, Expr], columns: tuple[Expr, Expr]
) -> None:
    """Write a block of rows of a panel: rows (m, first), sums and their first row, columns (first, tiles)."""
    (m, row), (sums, first), (column, tiles) = rows, held, columns
    with T.serial(0, T.min(i64(BLOCK), m - row)) as line, T.serial(0, tiles) as tile:
        values = sums[first + line, span(tile * LANES, LANES)]
        output.store(row + line, column + tile * LANES, values, LANES, True)


def _pack(shape: Shape, ready: Ready, m: Expr, packed: Buffer, tile: Expr) -> None:
    """Sixteen rows of x as tiles; rows after the last repeat it, and nothing of theirs is kept."""
    factor = f32(2.0**X_EXPONENT, LANES)

    def put(step: Expr, line: Expr, low: Expr, high: Expr) -> None:
        T.buffer_store(packed, _rounded(low * factor, high * factor), [tile, step, line, span(0, LANES)])

    with T.serial(0, i64(LANES)) as line:
        x, row = ready(T.bind(T.min(tile * LANES + line, m - 1)))
        with T.serial(0, i64(shape.k // STEP)) as step:
            put(step, line, *(x[row, span(step * STEP + half, LANES)] for half in (0, LANES)))
        if shape.k % STEP:
            start, tail = shape.k // STEP * STEP, T.alloc_buffer((STEP,), "float32")
            for half in (0, LANES):
                T.buffer_store(tail, f32(0, LANES), [span(half, LANES)])
            with T.serial(0, i64(shape.k % STEP)) as i:
                T.buffer_store(tail, x[row, start + i], [i])
            put(i64(shape.steps - 1), line, *(tail[span(half, LANES)] for half in (0, LANES)))


def _rounded(low: Expr, high: Expr) -> Expr:
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


def levels(packed: Sequence[Expr], byte: int) -> Expr:
    """Pairs of float16 from a byte of each int32 lane: its nibbles, less 8, or those of two vectors, less
    128."""
    return _nibbles(packed[0], byte) if len(packed) == 1 else _bytes(packed[0], packed[1], byte)


def _nibbles(packed: Expr, byte: int) -> Expr:
    starts = [32 * lane + 8 * byte + 4 * half for lane in (0, 1) for half in (0, 0, 1, 1)]
    control = splat(T.int64(int.from_bytes(bytes(starts), "little")), 8)
    given = (T.reinterpret("int8x64", operand) for operand in (control, packed))
    fields = intrinsic("int8x64", "llvm.x86.avx512.pmultishift.qb.512", *given)
    # Only the low five bits of an index count, so the table holds the 16 levels twice.
    values = T.Cast("float16x32", (T.ramp(T.int32(0), 1, 32) & i32(15, 32)) - i32(8, 32))
    both = (T.reinterpret("int16x32", operand) for operand in (values, fields))
    return T.reinterpret("float16x32", intrinsic("int16x32", "llvm.x86.avx512.permvar.hi.512", *both))


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


def _configure() -> None:
    """Eight tiles of 16 rows of 64 bytes, for the thread that runs this."""
    config = T.alloc_buffer((16,), "int32")
    words = {0: 1, **dict.fromkeys(range(4, 8), 0x00400040), **dict.fromkeys((12, 13), 0x10101010)}
    for word in range(16):
        T.buffer_store(config, i32(words.get(word, 0)), [word])
    _tile("ldtilecfg", T.address_of(config[0]))


def _move(name: str, number: int, buffer: Buffer, place: tuple[Expr | int, ...], stride: int) -> None:
    """Load or store a tile whose rows are `stride` bytes apart in memory."""
    _tile(name, T.int8(number), T.address_of(buffer[place]), i64(stride))


def _tile(name: str, *arguments: Expr) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))
