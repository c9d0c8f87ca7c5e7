"""Stores 8-bit weights with a float16 scale for each group of 32: the values of GGUF's Q8_0 and IQ4_NL."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8))
