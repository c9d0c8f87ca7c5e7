"""Reads FP8 checkpoints of fbgemm: `weight` is multiplied by `weight_scale`, one scale for each row."""

from mlcbuild.checkpoints.quantized.fp8_reader import view

__all__ = ["view"]
