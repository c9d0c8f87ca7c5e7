"""The stored format `iq4_nl`: 4-bit codes that stand for sixteen integers at growing distances, with a
float16 scale for each group of 32 weights; w = integer * scale. It keeps the values of GGUF's IQ4_NL; it
quantizes no weights itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import NONLINEAR, Blocks

FORMATS = both(Blocks(4, signed=False, table=NONLINEAR))
