"""The stored format `q5_0`: 5-bit codes with a float16 scale for each group of 32 weights. It keeps the
values of GGUF's Q5_0.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(5))
