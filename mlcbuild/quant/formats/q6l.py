"""The stored format `q6l`: 6-bit codes from -32 to 31 with a signed scale for each group of 16 weights, w =
code * scale.

A scale is the product of a float16 shared by 256 weights and an int8 of the group. level_search.py quantizes
floating point weights; `q6_k` stores the same numbers for those that GGUF has quantized.
"""

from mlcbuild.quant.blocks import Blocks
from mlcbuild.quant.leveled import both

FORMATS = both(Blocks(6, 16, "levels"))
