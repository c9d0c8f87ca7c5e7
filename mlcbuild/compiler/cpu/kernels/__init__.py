"""CPU kernels in TensorIR: matrix products and embeddings for every stored format, and the other operations
of a layer.
"""
