"""Stores 5-bit weights with a float16 scale for each group of 32: the values of GGUF's Q5_0."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(5))
