"""Stores 6-bit weights with scales of two levels for each group of 16: the values of GGUF's Q6_K."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(6, 16, "levels"))
