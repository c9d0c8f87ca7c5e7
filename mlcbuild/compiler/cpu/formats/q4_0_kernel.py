"""CPU kernels for the stored format q4_0, which keeps the values of GGUF's Q4_0, TQ1_0 and TQ2_0: int8
activations are multiplied with 4-bit codes in tiles of 16 rows, with a float16 scale for each group of 32
weights.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
