"""The stored format `q3l`: 3-bit codes from -4 to 3 with a signed scale for each group of 16 weights, w =
code * scale.

A scale is the product of a float16 shared by 256 weights and an int8 of the group. level_search.py quantizes
floating point weights. At 3 bits, one scale per 16 weights loses less than a scale and a minimum per 32
weights, which take more bits: on SmolLM2-135M the loss is 0.76 nats instead of 1.06.
"""

from mlcbuild.quant.blocks import Blocks
from mlcbuild.quant.leveled import both

FORMATS = both(Blocks(3, 16, "levels"))
