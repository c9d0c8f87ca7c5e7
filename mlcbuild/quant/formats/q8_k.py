"""Stores 8-bit weights, scales and minima of two levels for each group of 16.

It holds rows of several types with scales of two levels in one parameter.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, 16, "levels", minimum=True))
