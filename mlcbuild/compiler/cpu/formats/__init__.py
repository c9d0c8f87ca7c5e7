"""CPU kernels for stored weights, one module per stored format, named like the format. Its dictionary KERNELS
maps physical layout -> FormatKernel.
"""
