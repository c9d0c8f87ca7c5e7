"""CPU kernels for the stored format nvfp4, which keeps the values of NVFP4: int8 activations are multiplied
with twice the 4-bit floats, which are integers, in tiles of 16 rows, with a float32 scale for each group of
16 weights.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
