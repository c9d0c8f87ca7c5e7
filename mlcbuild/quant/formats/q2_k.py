"""The stored format `q2_k`: 4-bit codes and, for each group of 16 weights, a scale and a minimum, each the
product of a float16 shared by 256 weights and a byte of the group. It keeps the values of GGUF's Q2_K.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(4, 16, "levels", minimum=True, signed=False))
