"""The stored format `e4m3`: 8-bit floats with 4 bits of exponent and 3 of fraction, and a float32 scale for
each group of 32 weights; w = float * scale. It keeps the values of FP8 checkpoints; it quantizes no weights
itself."""

from mlcbuild.quant.blocked import rows
from mlcbuild.quant.blocks import E4M3, Blocks

FORMATS = {"row": rows(Blocks(8, scale="float32", signed=False, floats=E4M3))}
