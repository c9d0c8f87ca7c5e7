"""The stored format `q8_1`: 8-bit codes from -128 to 127 with a float16 scale and a float16 minimum for each
group of 32 weights; w = code * scale + minimum.

It keeps the values of a parameter whose rows come from several types of tensors with float16 scales, some
with a minimum; it quantizes no weights itself.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, minimum=True))
