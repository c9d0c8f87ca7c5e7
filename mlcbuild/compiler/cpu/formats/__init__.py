"""CPU kernels for stored weights, one module per stored format, named like the format with `_kernel` behind
it. Each module has a dictionary KERNELS, physical layout of the weights ("plain", "row" or "x16") ->
FormatKernel."""
