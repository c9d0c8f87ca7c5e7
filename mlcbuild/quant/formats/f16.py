"""The stored format `f16`: weights as float16 numbers, rounded to nearest even."""

from mlcbuild.quant.plain import plain

FORMATS = {"plain": plain("float16")}
