"""The stored format `mxfp4`: 8-bit codes and a float32 scale for each group of 32 weights. It keeps the
values of GGUF's MXFP4, whose scales float16 cannot hold.
"""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, scale="float32"))
