"""The stored format `q4l`: 4-bit codes with a scale and a minimum for each group of 32 weights, w = code *
scale + minimum.

A scale is a float16 of 256 weights times an int8 of the group, a minimum a float16 of 256 weights times a
uint8. level_search.py quantizes.
"""

from mlcbuild.quant.blocks import Blocks
from mlcbuild.quant.leveled import both

FORMATS = both(Blocks(4, scale="levels", minimum=True, signed=False))
