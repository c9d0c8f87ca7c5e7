"""CPU kernels for the stored format q4_k, which keeps the values of GGUF's Q4_K: int8 activations are
multiplied with 4-bit codes in tiles of 16 weight rows. Each group of 32 weights has a scale, a float16 shared
by 256 weights times an int8, and a minimum, another such float16 times a uint8."""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
