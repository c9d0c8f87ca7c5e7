"""The stored format `iq4_xs`: 8-bit codes from -128 to 127 and, for each group of 32 weights, a scale that is
the product of a float16 shared by 256 weights and an int8; w = code * scale. It keeps the values of GGUF's
IQ4_XS; it quantizes no weights itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8, scale="levels"))
