"""The stored format `q8s`: 8-bit codes with a signed float16 scale for each group of 32 weights, for products
with int8 activations.

code = clip(rint(w / scale + 128), 0, 255), where scale is the weight of largest magnitude, with its sign,
divided by -128 and rounded to float16; where that is 0, scale is 2**-24, the smallest float16.
"""

from mlcbuild.quant.grouped import rows, tiles
from mlcbuild.quant.groups import Groups

_GROUPS = Groups(8, 128, 255, "float16", signed=True)
FORMATS = {"x16": tiles(_GROUPS), "row": rows(_GROUPS)}
