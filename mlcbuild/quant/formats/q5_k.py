"""Stores 5-bit weights, scales and minima of two levels for each group of 32: the values of GGUF's Q5_K."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(5, scale="levels", minimum=True, signed=False))
