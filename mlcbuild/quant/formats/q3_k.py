"""The stored format `q3_k`: 4-bit codes from -8 to 7 and, for each group of 16 weights, a scale that is the
product of a float16 shared by 256 weights and an int8; w = code * scale. It keeps the values of GGUF's Q3_K,
whose codes are from -4 to 3; unlike `q3l`, it quantizes no weights itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(4, 16, "levels"))
