"""The stored format `q8f32`: 8-bit codes with a float32 scale for each group of 32 weights, as in mlc-llm's
q8f32_1.

code = clip(rint(w / scale + 127), 0, 254), scale = max|w| / 127 of the group; in a group of zeros, scale 0
and all codes 127. The bytes are those that mlc-llm writes for a matrix whose number of columns is a multiple
of 32.
"""

from mlcbuild.quant.grouped import rows
from mlcbuild.quant.groups import Groups

FORMATS = {"row": rows(Groups(8, 127, 254, "float32"))}
