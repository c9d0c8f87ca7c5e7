"""CPU kernels for stored weights. Each format has one file, whose `KERNELS` maps physical layout ->
`FormatKernel`.
"""
