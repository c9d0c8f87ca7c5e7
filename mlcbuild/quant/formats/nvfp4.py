"""The stored format `nvfp4`: 4-bit floats (E2M1) and a float32 scale for each group of 16 weights; w = twice
the float * scale. It keeps the values of NVFP4, with the scale of the whole matrix in those of the groups; it
quantizes no weights itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import TWICE_E2M1, Blocks

FORMATS = both(Blocks(4, 16, "float32", signed=False, table=TWICE_E2M1))
