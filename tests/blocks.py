"""Creates rows of every quantized GGUF type, with random codes and finite scales, for tests."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from mlcbuild.checkpoints.gguf_types import TYPES, BlockType
from mlcbuild.quant.codebooks import CODEBOOKS

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "NVFP4": (),
    "Q1_0": (0,),
    "Q2_0": (0,),
    **dict.fromkeys(CODEBOOKS - {"IQ1_M"}, (0,)),
    "IQ1_M": (),
}
"""Name of a GGUF type -> byte offsets of the float16 fields in each of its blocks. NVFP4 has none; in IQ1_M
the bits of the only one are in four places."""
SPECIAL = np.array([0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-14, 1.0], np.float16)


def reference(raw: NDArray[np.uint8], kind: BlockType) -> NDArray[np.float32]:
    """Returns the float32 weights of quantized rows, uint8 [rows, bytes of a row], as the package gguf
    decodes them or, for the two types that it does not decode, as their definition in ggml says."""
    with np.errstate(all="ignore"):
        if kind.name not in ("Q1_0", "Q2_0"):
            weights: NDArray[np.float32] = quants.dequantize(raw, GGMLQuantizationType(kind.number))
            return weights
        blocks = raw.reshape(-1, kind.size)
        scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        width = int(kind.name[1])
        bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(len(blocks), -1, width)
        codes = (bits * (1 << np.arange(width))).sum(axis=-1).astype(np.float32)
        centred = 2 * codes - 1 if width == 1 else codes - 1
        own: NDArray[np.float32] = (centred * scales).reshape(len(raw), -1)
        return own


def kind_of(name: str) -> BlockType:
    return next(kind for kind in TYPES.values() if kind.name == name)


def finite_rows(name: str, rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """Returns the bytes of random quantized rows, uint8 [rows, bytes of a row]. name: a type of GGUF tensors.
    Scales are normally distributed; every seventh is a special number, such as zero of either sign."""
    kind, rng = kind_of(name), np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // kind.weights, kind.size), dtype=np.uint8)
    for offset in HALVES[name]:
        scales = rng.normal(size=len(blocks)).astype(np.float16)
        scales[::7] = np.resize(SPECIAL, len(scales[::7]))
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(120, 136, len(blocks))
    if name == "IQ1_M":  # the sign and the high bits of the exponent of its scale
        blocks[:, 55] = blocks[:, 55] & 15 | 0x30
    return blocks.reshape(rows, -1)
