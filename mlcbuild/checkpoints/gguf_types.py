"""The types of GGUF tensors, by their names and numbers in ggml: the sizes of their blocks, and which of them
can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF tensors: its name, number and block size."""

    name: str
    """The name of a GGUF tensor type in ggml, such as "Q4_K"."""
    number: int
    """The number of a GGUF tensor type in the tensor table of a GGUF file."""
    weights: int
    """Number of weights in one block of a quantized GGUF tensor type; 1 for types of plain numbers."""
    size: int
    """Size in bytes of one block of a GGUF tensor type: consecutive weights that share scales."""


_READABLE = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("Q4_0", 2, 32, 18),
    BlockType("Q4_1", 3, 32, 20),
    BlockType("Q5_0", 6, 32, 22),
    BlockType("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34),
    BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110),
    BlockType("Q4_K", 12, 256, 144),
    BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210),
    BlockType("IQ2_XXS", 16, 256, 66),
    BlockType("IQ2_XS", 17, 256, 74),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50),
    BlockType("IQ4_NL", 20, 32, 18),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    BlockType("IQ4_XS", 23, 256, 136),
    BlockType("I8", 24, 1, 1),
    BlockType("I16", 25, 1, 2),
    BlockType("I32", 26, 1, 4),
    BlockType("I64", 27, 1, 8),
    BlockType("F64", 28, 1, 8),
    BlockType("IQ1_M", 29, 256, 56),
    BlockType("BF16", 30, 1, 2),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockType("MXFP4", 39, 32, 17),
    BlockType("NVFP4", 40, 64, 36),
    BlockType("Q1_0", 41, 128, 18),
    BlockType("Q2_0", 42, 64, 18),
)
TYPES: Mapping[int, BlockType] = MappingProxyType({kind.number: kind for kind in _READABLE})
"""Number of a GGUF tensor type -> the type, for all types that gguf_blocks.py can decode."""
UNREADABLE: Mapping[int, str] = MappingProxyType(
    {
        # removed from ggml
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
        # activations, never in files
        9: "Q8_1",
        15: "Q8_K",
    }
)
"""Number of a GGUF tensor type -> its name, for the types that cannot be read."""
