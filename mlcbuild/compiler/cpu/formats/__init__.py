"""CPU kernels for stored weights, one module per stored format, named like the format with `_kernel` behind
it. Its dictionary KERNELS maps physical layout -> FormatKernel.
"""
