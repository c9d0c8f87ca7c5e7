"""The stored format `q6_k`: 6-bit codes from -32 to 31 and, for each group of 16 weights, a scale that is the
product of a float16 shared by 256 weights and an int8; w = code * scale. It keeps the values of GGUF's Q6_K;
unlike `q6l`, it quantizes no weights itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import Blocks

FORMATS = both(Blocks(6, 16, "levels"))
