"""The stored format `q4s`: 4-bit codes with a signed float16 scale for each group of 32 weights, w = (code -
8) * scale, for products with int8 activations.

code = clip(rint(w / scale + 8), 0, 15). scale is the one of least squared error, weighted by the magnitudes
of the weights (`fit` in search.py), rounded to float16. Its sign is opposite to that of the weight of largest
magnitude, which gets the code 0 or one near it.
"""

from mlcbuild.quant.grouped import rows, tiles
from mlcbuild.quant.groups import Groups

_GROUPS = Groups(4, 8, 15, "float16", signed=True)
FORMATS = {"x16": tiles(_GROUPS), "row": rows(_GROUPS)}
