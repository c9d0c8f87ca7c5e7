"""The stored format `q8_0`: 8-bit codes from -128 to 127 with a float16 scale for each group of 32 weights; w
= code * scale. It keeps the values of GGUF's Q8_0 and IQ4_NL; unlike `q8s`, it quantizes no weights
itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(8))
