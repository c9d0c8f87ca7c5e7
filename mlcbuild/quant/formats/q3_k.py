"""Stores 4-bit weights with scales of two levels for each group of 16: the values of GGUF's Q3_K."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(4, 16, "levels"))
