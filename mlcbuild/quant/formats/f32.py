"""The stored format `f32`: weights as float32 numbers."""

from mlcbuild.quant.plain import plain

FORMATS = {"plain": plain("float32")}
