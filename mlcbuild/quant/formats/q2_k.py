"""Stores 4-bit weights, scales and minima of two levels for each group of 16: the values of GGUF's Q2_K."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(4, 16, "levels", minimum=True, signed=False))
