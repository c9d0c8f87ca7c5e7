"""The stored format `iq4_xs`: 4-bit codes that stand for sixteen integers at growing distances and, for each
group of 32 weights, a scale that is the product of a float16 shared by 256 weights and an int8; w = integer *
scale. It keeps the values of GGUF's IQ4_XS; it quantizes no weights itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import NONLINEAR, Blocks

FORMATS = both(Blocks(4, scale="levels", signed=False, table=NONLINEAR))
