"""The stored format `mxfp4`: 4-bit floats (E2M1) and a float32 scale for each group of 32 weights; w = twice
the float * scale. It keeps the values of MXFP4, whose scales float16 cannot hold; it quantizes no weights
itself."""

from mlcbuild.quant.blocked import both
from mlcbuild.quant.blocks import TWICE_E2M1, Blocks

FORMATS = both(Blocks(4, scale="float32", signed=False, table=TWICE_E2M1))
