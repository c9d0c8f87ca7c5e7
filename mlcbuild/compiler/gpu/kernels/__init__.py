"""GPU kernels in TensorIR, one module for each part of a transformer layer."""
