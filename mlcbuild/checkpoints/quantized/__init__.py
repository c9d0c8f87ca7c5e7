"""Reads quantized weights as other tools store them. Each `quant_method` has a file with a function
`view(settings, tensors)`.

settings: the quantization_config of the checkpoint. tensors: name in the files -> tensor. The function
returns the tensors, in which one tensor replaces the parts of each quantized matrix, and raises
CheckpointError. No list of the files exists: `quantization.py` looks them up in this directory.
"""
