"""The stored format `q4_1`: 4-bit codes from 0 to 15 with a float16 scale and a float16 minimum for each
group of 32 weights; w = code * scale + minimum. It keeps the values of GGUF's Q4_1; it quantizes no weights
itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(4, minimum=True, signed=False))
