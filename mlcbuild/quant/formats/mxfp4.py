"""The stored format `mxfp4`: 8-bit codes from -128 to 127 and a float32 scale for each group of 32 weights; w
= code * scale. It keeps the values of GGUF's MXFP4, whose scales float16 cannot hold; it quantizes no weights
itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, scale="float32"))
