"""Stores 8-bit weights with a float16 scale and minimum for each group of 32.

It holds rows of several types with float16 scales, some with a minimum, in one parameter.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, minimum=True))
