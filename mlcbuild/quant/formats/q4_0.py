"""Stores 4-bit weights with a float16 scale for each group of 32: the values of GGUF's Q4_0, TQ1_0 and
TQ2_0."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(4))
