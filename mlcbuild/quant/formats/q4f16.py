"""The stored format `q4f16`: 4-bit codes with a float16 scale for each group of 32 weights, as in mlc-llm's
q4f16_1; w = (code - 7) * scale.

code = clip(rint(w / scale + 7), 0, 15). scale is the one of least squared error, weighted by the magnitudes
of the weights (`fit` in search.py), with the sign of the weight of largest magnitude, rounded to float16. The
sixteenth code is used, which mlc-llm leaves unused; the meaning of the bytes is the same.
"""

from mlcbuild.quant.grouped import rows
from mlcbuild.quant.groups import Groups

FORMATS = {"row": rows(Groups(4, 7, 15, "float16"))}
