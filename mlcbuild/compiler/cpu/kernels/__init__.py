"""CPU kernels in TensorIR: matrix products and embeddings of every stored format, and the rest of a layer."""
