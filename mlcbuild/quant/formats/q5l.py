"""The stored format `q5l`: 5-bit codes from 0 to 31 with a scale and a minimum for each group of 32 weights,
w = code * scale + minimum.

A scale is the product of a float16 shared by 256 weights and an int8 of the group; a minimum is the product
of another such float16 and a uint8. level_search.py quantizes floating point weights; `q5_k` stores the same
numbers for those that GGUF has quantized.
"""

from mlcbuild.quant.blocks import Blocks
from mlcbuild.quant.leveled import both

FORMATS = both(Blocks(5, scale="levels", minimum=True, signed=False))
