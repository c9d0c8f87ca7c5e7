"""The stored format `q5_k`: 5-bit codes from 0 to 31 and, for each group of 32 weights, a scale and a
minimum, each the product of a float16 shared by 256 weights and an integer of the group (int8 for scales,
uint8 for minima); w = code * scale + minimum. It keeps the values of GGUF's Q5_K; unlike `q5l`, it quantizes
no weights itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(5, scale="levels", minimum=True, signed=False))
