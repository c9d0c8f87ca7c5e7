"""The stored format `e5m2`: 8-bit floats with 5 bits of exponent and 2 of fraction, and a float32 scale for
each group of 32 weights; w = float * scale. It keeps the values of FP8 checkpoints; it quantizes no weights
itself."""

from mlcbuild.quant.blocked import rows
from mlcbuild.quant.blocks import E5M2, Blocks

FORMATS = {"row": rows(Blocks(8, scale="float32", signed=False, floats=E5M2))}
