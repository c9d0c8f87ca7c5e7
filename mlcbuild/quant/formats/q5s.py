"""Stores 5-bit weights with a signed float16 scale for each group of 32, for products with int8 activations.

q = clip(rint(w / scale + 16), 0, 31), scale = -fit(w): see `Groups`.
"""

from mlcbuild.quant.grouped import rows, tiles
from mlcbuild.quant.groups import Groups

_GROUPS = Groups(5, 16, 31, "float16", signed=True)
FORMATS = {"x16": tiles(_GROUPS), "row": rows(_GROUPS)}
