"""The stored format `q8_k`: 8-bit codes from -128 to 127; w = code * scale + minimum. Each group of 16
weights has a scale and a minimum, each the product of a float16 shared by 256 weights and an integer of the
group: int8 for scales, uint8 for minima.

It can hold, without change, the rows of a parameter that come from tensors of several quantized types with
such scales. It quantizes no weights itself: packing weights that are not quantized raises CheckpointError.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, 16, "levels", minimum=True))
