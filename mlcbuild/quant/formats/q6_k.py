"""The stored format `q6_k`: 6-bit codes and, for each group of 16 weights, a scale that is the product of a
float16 shared by 256 weights and an int8. It keeps the values of GGUF's Q6_K.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(6, 16, "levels"))
