"""Reads FP8 checkpoints of fbgemm: `weight` with one `weight_scale` for each row."""

from mlcbuild.checkpoints.quantized.fp8_reader import view

__all__ = ["view"]
