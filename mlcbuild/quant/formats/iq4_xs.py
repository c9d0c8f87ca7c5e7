"""Stores 8-bit weights with scales of two levels for each group of 32: the values of GGUF's IQ4_XS."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, scale="levels"))
