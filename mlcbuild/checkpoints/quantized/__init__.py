"""Reads quantized weights as other tools store them. Each `quant_method` has a file
`<quant_method>_reader.py` (in lower case, `_` for `-`) with a function `view(settings, tensors)`.

settings: the quantization_config of the checkpoint. tensors: name in the files -> tensor. The function
returns the tensors, in which one tensor replaces the parts of each quantized matrix and scales of activations
and KV caches are left out, and raises CheckpointError for settings that are not supported and parts that are
missing or do not fit. No list of the files exists: `quantization.py` looks them up in this directory.
"""
