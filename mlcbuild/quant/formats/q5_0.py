"""The stored format `q5_0`: 5-bit codes from -16 to 15 with a float16 scale for each group of 32 weights; w =
code * scale. It keeps the values of GGUF's Q5_0; unlike `q5s`, it quantizes no weights itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(5))
