"""The stored format `q8_1`: 8-bit codes from -128 to 127 with a float16 scale and a float16 minimum for each
group of 32 weights; w = code * scale + minimum.

It stores, without change, parameters of 6-bit codes with minima, and those whose rows come from several
quantized types with float16 scales, some with a minimum. It quantizes no weights itself: packing weights that
are not quantized raises CheckpointError.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, minimum=True))
