"""The stored format `q4s`: 4-bit codes with a signed float16 scale for each group of 32 weights, for products
with int8 activations.

code = clip(rint(w / scale + 8), 0, 15). scale is the one of least weighted squared error (`fit` in
search.py), negated so that the weight of largest magnitude gets the code 0 or one near it, and rounded to
float16.
"""

from mlcbuild.quant.grouped import rows, tiles
from mlcbuild.quant.groups import Groups

_GROUPS = Groups(4, 8, 15, "float16", signed=True)
FORMATS = {"x16": tiles(_GROUPS), "row": rows(_GROUPS)}
