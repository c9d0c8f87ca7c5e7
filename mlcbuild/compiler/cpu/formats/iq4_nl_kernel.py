"""CPU kernels for the stored format iq4_nl, which keeps the values of GGUF's IQ4_NL: int8 activations are
multiplied with the integers for which 4-bit codes stand, in tiles of 16 rows, with a float16 scale for each
group of 32 weights.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
