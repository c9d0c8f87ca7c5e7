"""Descriptions of quantized checkpoints, one of each kind, from which fuzzing starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.checkpoints.test_quantized_compressed import CT, fields, fp4
from tests.checkpoints.test_quantized_fp8 import fp8
from tests.checkpoints.test_quantized_gptq import awq, gptq
from tests.checkpoints.test_quantized_tables import BNB, bnb, int8, mlx
from tests.quantized_files import ODD, SMALL, Quantizer

SEEDS: tuple[tuple[Mapping[str, Any], Quantizer, Mapping[str, Any]], ...] = (
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8("block"), ODD),
    ({"quant_method": "fbgemm_fp8"}, fp8("row"), SMALL),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}, gptq(), SMALL),
    ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, gptq(3, 32, 0, order="act"), SMALL),
    ({"bits": 4, "group_size": 64}, mlx(4, 64), SMALL),
    (BNB, bnb(True), SMALL),
    (BNB, int8(), SMALL),
    (CT, fields(3), SMALL),
    (CT, fp4({"kind": "mx"}), SMALL),
    ({"quant_method": "modelopt"}, fp4({"kind": "opt"}), SMALL),
    ({"quant_method": "awq", "version": "gemm", "group_size": 64}, awq(64), SMALL),
)
"""The quantized checkpoints, one of each kind: (quantization_config of config.json, function that quantizes a
matrix, other fields of config.json)."""
