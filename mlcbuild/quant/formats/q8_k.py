"""The stored format `q8_k`: 8-bit codes and, for each group of 16 weights, a scale and a minimum, each the
product of a float16 shared by 256 weights and a byte of the group.

It keeps the values of a parameter whose rows come from several types of tensors with such scales.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, 16, "levels", minimum=True))
