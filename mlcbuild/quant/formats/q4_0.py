"""The stored format `q4_0`: 4-bit codes from -8 to 7 with a float16 scale for each group of 32 weights; w =
code * scale. It keeps the values of GGUF's Q4_0, TQ1_0 and TQ2_0; unlike `q4s`, it quantizes no weights
itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(4))
