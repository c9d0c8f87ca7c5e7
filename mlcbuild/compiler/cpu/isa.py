"""Describes the instruction sets of CPUs: vector lengths, tile sizes and special instructions, by which
kernels are emitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tvm.target import Target as TvmTarget
from tvm.target.codegen import llvm_get_cpu_features

from mlcbuild.targets.target import Target

Dot = Literal["vpdpbusd", "pmaddubsw", "sdot", "mul16"]
"""Name of the instruction by which kernels sum products of unsigned 4-bit weights and signed 8-bit
activations. Weights of more bits may need another one, which dot.Products.way chooses.

vpdpbusd   x86 VNNI: adds four byte products to each int32 lane.
pmaddubsw  x86: adds pairs of byte products to int16 lanes, which hold a group of 32 4-bit weights.
sdot       Arm: adds four byte products to each int32 lane.
mul16      no special instruction: activations are int16, and int16 lanes hold the sum of a group.
"""


@dataclass(frozen=True)
class ISA:
    """The properties of a CPU's instruction set, and the tile sizes that suit it. Kernels compute products x
    @ W.T; a register tile holds the sums of some rows of activations x with some rows of weights W.
    """

    name: str
    features: tuple[str, ...]
    """LLVM features that a processor must have for this instruction set; () fits every processor."""
    lanes: int
    """Number of float32 values in one vector register."""
    half: bool
    """True if the instruction set has an instruction that converts float16 to float32; False: integer
    operations do it.
    """
    dot: Dot
    tile_rows: int
    """Number of rows of activations x in the register tile of a float32 product x @ W.T; the tile is four
    weight rows wide."""
    stream_rows: int
    """Number of weight rows that one core multiplies at the same time in a float32 product with few rows of
    activations, so that it reads as many streams of memory."""
    batch: int
    """Number of rows of activations x that share one pass over the weights of a float32 product, when there
    are few rows and weights stream from memory. It is two instead for weights whose codes are stored with an
    offset, which need twice as many registers."""
    dot_batch: int
    """Maximum number of rows of activations x that share one pass over weights in int8 products, when weights
    stream from memory: a power of two, at least 4."""
    dot_tile: tuple[int, int] | None
    """(rows of activations x, vector registers along the weight rows, with a lane for each weight row) in the
    register tile of an int8 product with many rows, which first unpacks weights into a buffer. None: weights
    are unpacked again for each batch of rows."""
    amx: bool = False
    """True if AMX tile registers multiply prompt rows, in bfloat16."""
    smmla: bool = False
    """True if the instruction set has Arm's smmla, which multiplies two rows of x with two rows of weights,
    eight bytes of each.
    """

    @property
    def dot_batches(self) -> tuple[int, ...]:
        """Returns the numbers of rows of activations x that can share one pass over weights in int8 products:
        powers of two from 2 to `dot_batch`."""
        return tuple(1 << i for i in range(1, self.dot_batch.bit_length()))


_X86_512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")

_NEON = ISA(
    "neon",
    ("neon", "dotprod"),
    lanes=4,
    half=True,
    dot="sdot",
    tile_rows=6,
    stream_rows=4,
    batch=4,
    dot_batch=4,
    dot_tile=(3, 4),
)

ISAS: tuple[ISA, ...] = (
    ISA(
        "avx512amx",
        (*_X86_512, "avx512vnni", "avx512vbmi", "avx512fp16", "amx-tile", "amx-bf16"),
        lanes=16,
        half=True,
        dot="vpdpbusd",
        tile_rows=6,
        stream_rows=4,
        batch=4,
        dot_batch=8,
        dot_tile=None,
        amx=True,
    ),
    ISA(
        "avx512vnni",
        (*_X86_512, "avx512vnni"),
        lanes=16,
        half=True,
        dot="vpdpbusd",
        tile_rows=6,
        stream_rows=4,
        batch=4,
        dot_batch=8,
        dot_tile=None,
    ),
    ISA(
        "avx512",
        _X86_512,
        lanes=16,
        half=True,
        dot="pmaddubsw",
        tile_rows=6,
        stream_rows=4,
        batch=4,
        dot_batch=8,
        dot_tile=None,
    ),
    ISA(
        "avxvnni",
        ("avx2", "fma", "f16c", "avxvnni"),
        lanes=8,
        half=True,
        dot="vpdpbusd",
        tile_rows=3,
        stream_rows=2,
        batch=4,
        dot_batch=8,
        dot_tile=(4, 2),
    ),
    ISA(
        "avx2",
        ("avx2", "fma", "f16c"),
        lanes=8,
        half=True,
        dot="pmaddubsw",
        tile_rows=3,
        stream_rows=2,
        batch=4,
        dot_batch=8,
        dot_tile=(4, 2),
    ),
    replace(
        _NEON,
        name="i8mm",
        features=(*_NEON.features, "i8mm"),
        # 8 sums, 8 results, 4 operands and 2 activations of the 32 registers: 8 independent smmla hide the
        # latency of 3 to 4 cycles at 2 a cycle (Arm's optimization guides of Neoverse N2 and V1).
        dot_tile=(4, 2),
        smmla=True,
    ),
    _NEON,
    ISA(
        "portable",
        (),
        lanes=4,
        half=False,
        dot="mul16",
        tile_rows=2,
        stream_rows=2,
        batch=4,
        dot_batch=4,
        dot_tile=(2, 2),
    ),
)
"""The supported instruction sets, best first. A target uses the first one whose LLVM features its processor
has.
"""


def tvm_target(target: Target) -> TvmTarget:
    """Returns TVM's description of a CPU target for code that runs on one core. It does not depend on the
    machine that builds.
    """
    # LLVM's -O3 takes a tenth more time and makes a seventh more bytes, but no product of quantized weights
    # is faster by more than 2 %, with AVX2, AVX-512 VNNI and AMX.
    level = {"kind": "llvm", "opt-level": 2}
    return TvmTarget(level | {"mtriple": target.triple, "mcpu": target.cpu, "mattr": list(target.features)})


def isa_for(target: Target) -> ISA:
    """Returns the best supported instruction set that the target's processor and features have, according to
    LLVM; the portable one if they have no other."""
    present = {str(feature) for feature in llvm_get_cpu_features(tvm_target(target))}
    return next(isa for isa in ISAS if present.issuperset(isa.features))
