"""The stored format `q8_0`: 8-bit codes with a float16 scale for each group of 32 weights. It keeps the
values of GGUF's Q8_0 and IQ4_NL.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8))
