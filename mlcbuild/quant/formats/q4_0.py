"""The stored format `q4_0`: 4-bit codes with a float16 scale for each group of 32 weights. It keeps the
values of GGUF's Q4_0, TQ1_0 and TQ2_0.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(4))
