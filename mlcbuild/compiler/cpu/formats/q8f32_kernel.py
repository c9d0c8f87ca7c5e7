"""CPU kernels for the stored format q8f32 (mlc-llm's q8f32_1): float32 activations are multiplied with 8-bit
codes, stored row by row with a float32 scale for each group of 32 weights.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.row_group import GroupRows
from mlcbuild.compiler.cpu.kernels.table_rows import copy_grouped_row

KERNELS = {"row": FormatKernel(lambda isa, n, k: GroupRows(isa, n, k, 8, "float32"), copy_grouped_row)}
