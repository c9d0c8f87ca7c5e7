"""Tests of checkpoints in 8-bit floats with one scale for each tensor, row or block, compared with products
in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild.checkpoints import conversion
from mlcbuild.checkpoints.checkpoint_views import views_for
from mlcbuild.errors import CheckpointError
from tests.checkpoint_files import Entry
from tests.quantized_files import (
    ODD,
    SMALL,
    Floats,
    Parts,
    Quantizer,
    check,
    check_converted,
    check_refused,
    floats,
    kept,
    quantized,
)

PEERS = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
KINDS = ["tensor", "scalar", "row", "rows", "block"]


def scales(random: np.random.Generator, kind: str, rows: int, columns: int, size: int) -> Floats:
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": (1,),
        "scalar": (),
        "row": (rows, 1),
        "rows": (rows,),
        "block": (-(-rows // size), -(-columns // size)),
    }
    return np.exp(random.standard_normal(shapes[kind]) - 6).astype(np.float32)


def stored(scale: Floats, code: str) -> Entry:
    if code == "BF16":
        return code, (scale.view(np.uint32) >> 16).astype(np.uint16)
    if code == "F8_E8M0":
        return code, (scale.view(np.uint32) >> 23 & 255).astype(np.uint8)
    return code, scale


def wide(entry: Entry) -> Floats:
    code, array = entry
    dtypes: dict[str, Any] = {"F8_E8M0": ml_dtypes.float8_e8m0fnu, "BF16": ml_dtypes.bfloat16}
    values: Floats = array.view(dtypes.get(code, np.float32)).astype(np.float32)
    return values


def fp8(
    kind: str, dtype: str = "F8_E4M3", part: str = "weight_scale", code: str = "F32", size: int = 128
) -> Quantizer:
    def quantize(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        codes = floats(random, dtype, rows, columns)
        entry = stored(scales(random, kind, rows, columns, size), code)
        scale: NDArray[np.float64] = wide(entry).astype(np.float64)
        if kind == "block":
            scale = scale.repeat(size, 0).repeat(size, 1)[:rows, :columns]
        elif kind == "rows":
            scale = scale[:, None]
        values = (codes.view(PEERS[dtype]).astype(np.float64) * scale).astype(np.float32)
        activation = ("F32", np.ones(1, np.float32))
        return {"weight": (dtype, codes), part: entry, "input_scale": activation}, values

    return quantize


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["F32", "BF16", "F8_E8M0"])
def test_weights_are_the_rounded_products(kind: str, code: str, tmp_path: Path) -> None:
    settings = {"quant_method": "fp8"}
    check(tmp_path, settings, quantized(tmp_path, settings, fp8(kind, code=code), ODD))


def test_blocks_of_another_size_and_another_float(tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    quantize = fp8("block", "F8_E5M2", "weight_scale_inv", size=32)
    check(tmp_path, settings, quantized(tmp_path, settings, quantize, ODD))


def test_rows_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converts a checkpoint of FP8 weights in chunks of a few rows, and checks the values: a chunk may begin
    in the middle of a block of rows that share a scale."""
    settings = {"quant_method": "fbgemm_fp8"}
    values = quantized(tmp_path, settings, fp8("block"), ODD)
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 4096)
    check_converted(tmp_path, settings, values, ODD)


@pytest.mark.parametrize(("dtype", "form"), [("F8_E4M3", "e4m3"), ("F8_E5M2", "e5m2")])
@pytest.mark.parametrize("kind", KINDS)
def test_floats_are_kept_with_their_scales(kind: str, dtype: str, form: str, tmp_path: Path) -> None:
    fields = {**SMALL, "intermediate_size": 144}
    quantized(tmp_path / "m", {"quant_method": "fp8"}, fp8(kind, dtype), fields)
    formats = kept(tmp_path)
    assert formats["layers.0.attn.o.weight"] == form
    assert formats["layers.0.mlp.down.weight"] == "f32"  # 144 columns are no groups of 32
    assert formats["layers.0.attn.qkv.weight"] == "f32"  # keys and values are float32


@pytest.mark.parametrize(("code", "form"), [("F8_E8M0", "f16"), ("F32", "f32")])
def test_scales_of_parts_of_a_group_are_applied(code: str, form: str, tmp_path: Path) -> None:
    """Checks matrices whose groups of 32 columns have two scales: no format has floats with such scales, but
    float16 holds the products if the scales are powers of two."""
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    quantized(tmp_path / "m", settings, fp8("block", code=code, size=16), SMALL)
    assert kept(tmp_path)["layers.0.attn.o.weight"] == form


@pytest.mark.parametrize(("dtype", "code"), [("F8_E4M3", 255), ("F8_E5M2", 124)])
def test_floats_that_are_no_numbers_are_refused(dtype: str, code: int, tmp_path: Path) -> None:
    """Checks a matrix that is stored as 8-bit floats and has a NaN or an infinite one."""

    def with_code(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        parts, values = fp8("row", dtype)(random, rows, columns)
        if columns == SMALL["intermediate_size"]:
            parts["weight"][1][0, 3] = code
        return parts, values

    quantized(tmp_path / "m", {"quant_method": "fp8"}, with_code, SMALL)
    with pytest.raises(CheckpointError, match=r"^layers\.0\.mlp\.down\.weight .*: it holds infinite or NaN"):
        kept(tmp_path)


WRONG: list[tuple[dict[str, Any], Quantizer, str]] = [
    (
        {"quant_method": "fp8"},
        lambda random, rows, columns: (
            {"weight_scale": ("F32", np.ones(1, np.float32))},
            np.zeros(1, np.float32),
        ),
        r"module 'model.layers.0.self_attn.q_proj' lacks its weight",
    ),
    (
        {"quant_method": "fp8"},
        lambda random, rows, columns: (
            {
                "weight": ("I8", np.ones((rows, columns), np.int8)),
                "weight_scale": ("F32", np.ones(1, np.float32)),
            },
            np.zeros(1, np.float32),
        ),
        r"has a weight of I8 and a weight_scale; it must be F8_E4M3 or F8_E5M2",
    ),
    (
        {"quant_method": "fp8"},
        lambda random, rows, columns: (
            {
                "weight": ("F8_E4M3", np.ones((rows, columns), np.uint8)),
                "weight_scale": ("F32", np.ones((3, 1), np.float32)),
            },
            np.zeros(1, np.float32),
        ),
        r"must have a weight_scale of \[1\] or \[64, 1\] or \[1, 1\] for its weight \[64, 64\], found \[",
    ),
    (
        {"quant_method": "fp8", "weight_block_size": "x"},
        fp8("block"),
        r"has blocks of x; weight_block_size mus",
    ),
    (
        {"quant_method": "hqq"},
        fp8("row"),
        r"weights of the method hqq cannot be read; .*use the original",
    ),
    ({"quant_method": 7}, fp8("row"), r"weights of the method '7' cannot be read"),
]


@pytest.mark.parametrize(("settings", "quantize", "message"), WRONG)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], quantize: Quantizer, message: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, settings, quantize, message)


def test_settings_that_are_no_object_are_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"config.json: quantization_config: must be an object, found '3'"
    ):
        views_for(3)
