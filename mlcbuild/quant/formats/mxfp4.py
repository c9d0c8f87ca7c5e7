"""Stores 8-bit weights with a float32 scale for each group of 32: the values of GGUF's MXFP4.

float16 cannot hold its scales.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, scale="float32"))
