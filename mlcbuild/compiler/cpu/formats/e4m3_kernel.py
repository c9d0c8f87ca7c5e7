"""CPU kernels for the stored format e4m3, which keeps the values of FP8 checkpoints: float32 activations are
multiplied with 8-bit floats, stored row by row with a float32 scale for each group of 32 weights.
"""

from mlcbuild.compiler.cpu.kernels.float_codes import FloatCodeRows
from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.quant.blocks import E4M3

KERNELS = {"row": FormatKernel(lambda isa, n, k: FloatCodeRows(isa, n, k, 8, "float32", E4M3))}
