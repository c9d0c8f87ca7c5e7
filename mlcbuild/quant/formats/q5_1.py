"""The stored format `q5_1`: 5-bit codes from 0 to 31 with a float16 scale and a float16 minimum for each
group of 32 weights; w = code * scale + minimum. It keeps the values of GGUF's Q5_1; it quantizes no weights
itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(5, minimum=True, signed=False))
