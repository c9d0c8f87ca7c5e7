"""Tests of quantized checkpoints in the formats of compressed-tensors, compared with that package, and of
MXFP4 of gpt-oss and NVFP4 of Model Optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mlcbuild_format.safetensors import Tensor
from safetensors.numpy import load_file

from mlcbuild import models
from mlcbuild.checkpoints import exact_weights
from mlcbuild.checkpoints.checkpoint_views import views_for
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.checkpoints.quantized import compressed_tensors_reader
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.errors import CheckpointError
from mlcbuild.models import parsing
from tests import typegoldens
from tests.checkpoint_files import Entry, save, single
from tests.conftest import ROOT
from tests.quantized_files import (
    SMALL,
    Floats,
    Parts,
    Quantizer,
    check,
    check_refused,
    floats,
    kept,
    quantized,
)

GOLDEN = ROOT / "tests" / "golden" / "compressed"
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def rows_of(tensor: Tensor, step: int) -> Floats:
    with Rows() as reader:
        starts = range(0, tensor.shape[0], step)
        return np.concatenate([reader.values(tensor, i, min(step, tensor.shape[0] - i)) for i in starts])


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.safetensors")))
def test_values_are_those_of_the_package(name: str) -> None:
    """Checks that matrices which the package compressed-tensors has quantized are read with the values to
    which that package decompresses them. It rounds to float16 or bfloat16, so the float32 values that are
    read are rounded in the same way before the comparison."""
    tensors = {tensor.name: tensor for tensor in read_header(GOLDEN / f"{name}.safetensors").tensors}
    expected = rows_of(tensors.pop("values"), 100)
    stored = {f"m.{part}": replace(tensor, name=f"m.{part}") for part, tensor in tensors.items()}
    read_tensor = compressed_tensors_reader.view(CT, stored)["m.weight"]
    for step in (100, 7):
        values = rows_of(read_tensor, step)
        if tensors["weight_scale"].dtype == "F16":
            values = values.astype(np.float16).astype(np.float32)
        elif name == "nvfp4":
            values = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(values, expected)


def fields(bits: int) -> Quantizer:
    """Returns a quantizer that packs codes as older releases of compressed-tensors did: 32 // bits codes in a
    word, none of which crosses a word border."""

    def quantize(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        codes = random.integers(0, 1 << bits, (rows, columns))
        zeros = random.integers(0, 1 << bits, (rows, 2))
        scale = np.exp(random.standard_normal((rows, 2)) - 5).astype(np.float32)
        values = (codes - zeros.repeat(columns // 2, 1)) * scale.astype(np.float64).repeat(columns // 2, 1)
        parts: dict[str, Entry] = {
            "weight_packed": ("I32", words(codes, bits)),
            "weight_zero_point": ("I32", words(zeros.T, bits).T.copy()),
            "weight_scale": ("F32", scale),
            "weight_shape": ("I64", np.array([rows, columns])),
            "weight_g_idx": ("I32", np.full(columns, -1, np.int32)),
        }
        return parts, values.astype(np.float32)

    return quantize


def words(codes: Any, bits: int) -> Any:
    size = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % size))).reshape(len(codes), -1, size)
    return (padded << (bits * np.arange(size))).sum(2).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_codes_in_fields_of_words(bits: int, tmp_path: Path) -> None:
    check(tmp_path, CT, quantized(tmp_path, CT, fields(bits)))


def fp4(settings: Mapping[str, Any]) -> Quantizer:
    names = {"nv": ("weight_packed", "weight_global_scale"), "opt": ("weight", "weight_scale_2")}

    def quantize(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        codes = random.integers(0, 16, (rows, columns))
        values = E2M1[codes].astype(np.float32)
        raw = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        if settings["kind"] == "mx":
            scale = random.integers(100, 130, (rows, columns // 32)).astype(np.uint8)
            values *= np.ldexp(np.float32(1), scale.astype(int) - 127).repeat(32, 1)
            return {"weight_packed": ("U8", raw), "weight_scale": ("U8", scale)}, values
        scale = floats(random, "F8_E4M3", rows, columns // 16)
        overall = np.array([700.5], np.float32)
        stored = scale_values(scale)
        stored = stored / overall if settings["kind"] == "nv" else stored * overall
        packed, total = names[settings["kind"]]
        parts: dict[str, Entry] = {
            packed: ("U8", raw),
            "weight_scale": ("F8_E4M3", scale),
            total: ("F32", overall),
        }
        values *= stored.repeat(16, 1)
        return parts, values

    return quantize


def scale_values(codes: Any) -> Floats:
    values: Floats = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


@pytest.mark.parametrize("kind", ["mx", "nv", "opt"])
def test_4_bit_floats(kind: str, tmp_path: Path) -> None:
    settings = {"quant_method": "modelopt" if kind == "opt" else "compressed-tensors", "kind": kind}
    check(tmp_path, settings, quantized(tmp_path, settings, fp4(settings)))


@pytest.mark.parametrize(("kind", "form"), [("mx", "mxfp4"), ("nv", "nvfp4"), ("opt", "nvfp4")])
def test_values_that_formats_keep(kind: str, form: str, tmp_path: Path) -> None:
    settings = {"quant_method": "modelopt" if kind == "opt" else "compressed-tensors", "kind": kind}
    fields = {**SMALL, "intermediate_size": 128 if kind == "mx" else 144}
    quantized(tmp_path / "m", settings, fp4(settings), fields)
    formats = kept(tmp_path)
    assert formats["layers.1.attn.o.weight"] == form
    # 144 columns are whole groups of 16, but not of 32.
    assert formats["layers.1.mlp.down.weight"] == (form if kind == "mx" else "f32")


def gpt_oss(root: Path) -> tuple[models.ModelConfig, dict[str, Floats]]:
    """Writes a gpt-oss checkpoint with random experts in MXFP4. Returns (config, name of a tensor -> its
    values in transformers' shape [experts, inputs, outputs])."""
    config = {**typegoldens.CONFIGS["gpt_oss"], "hidden_size": 64, "intermediate_size": 96}
    parsed = parsing.parse(config)
    random, content, values = np.random.default_rng(4), {}, {}
    for param in models.parameters(parsed):
        for piece in parsing.tensor_names(parsed).sources[param.name]:
            if piece.tensor.endswith(("gate_up_proj", "down_proj")):
                experts = config["num_local_experts"]
                inputs, outputs = (64, 192) if "gate_up" in piece.tensor else (96, 64)
                raw = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
                scale = random.integers(115, 125, (experts, outputs, inputs // 32), np.uint8)
                content[f"{piece.tensor}_blocks"] = ("U8", raw)
                content[f"{piece.tensor}_scales"] = ("U8", scale)
                weights = np.stack([E2M1[raw & 15], E2M1[raw >> 4]], -1).reshape(*scale.shape, 32)
                weights *= 2.0 ** (scale.astype(int) - 127)[..., None]
                values[piece.tensor] = (
                    weights.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32)
                )
            else:
                shape = (piece.stored_rows, *param.shape[1:])
                if len(param.shape) == 2 and "experts" in param.name:
                    shape = param.shape
                content[piece.tensor] = ("F32", random.standard_normal(shape, np.float32))
    single(root, content)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (root / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    (root / "tokenizer.json").write_text("{}")
    return parsed, values


def test_the_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Checks that the experts of gpt-oss give the same parameters as an unquantized file with equal values,
    and that their values can be kept without rounding."""
    config, values = gpt_oss(tmp_path / "m")
    names = parsing.tensor_names(config)
    plain = {tensor.name: tensor for tensor in read_header(tmp_path / "m" / "model.safetensors").tensors}
    stored = load_file(tmp_path / "m" / "model.safetensors")
    content: dict[str, Entry] = {
        name: ("F32", stored[name]) for name in plain if not name.endswith(("_blocks", "_scales"))
    }
    (tmp_path / "plain").mkdir()
    save(tmp_path / "plain" / "model.safetensors", {**content, **{n: ("F32", v) for n, v in values.items()}})
    expected = exact_weights.checkpoint(tmp_path / "plain", config, names)
    views = views_for({"quant_method": "mxfp4"})
    read = exact_weights.checkpoint(tmp_path / "m", config, names, views)
    for name in expected:
        np.testing.assert_array_equal(np.asarray(read[name]), np.asarray(expected[name]), err_msg=name)
    formats = kept(tmp_path)
    assert formats["layers.0.mlp.experts.down.weight"] == "mxfp4"
    assert formats["layers.0.mlp.experts.gate_up.weight"] == "mxfp4"


def without(quantize: Quantizer, **change: Entry | None) -> Quantizer:
    def other(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        parts, values = quantize(random, rows, columns)
        whole = {**parts, **change}
        return {part: entry for part, entry in whole.items() if entry is not None}, values

    return other


ONES = np.ones((64, 64), np.int32)
WRONG: list[tuple[dict[str, Any], Quantizer, str]] = [
    ({**CT, "format": "marlin-24"}, fields(4), r"weights with the format marlin-24 cannot be read"),
    ({**CT, "transform_config": {"a": 1}}, fields(4), r"weights with a transform_config cannot be read"),
    (CT, without(fields(4), weight_shape=None), r"q_proj' lacks its weight_shape"),
    (
        CT,
        without(fields(4), weight_shape=("I64", np.array([3, 3]))),
        r"has the weight_shape \[3, 3\] and weights",
    ),
    (
        CT,
        without(fields(4), weight_packed=("I32", ONES)),
        r"has 64 words for the 64 columns of a row, which no",
    ),
    (
        CT,
        without(fields(4), weight_zero_point=("I32", ONES)),
        r"must have a weight_zero_point of I32 \[8, 2\]",
    ),
    (
        CT,
        without(fields(4), weight_scale=("F64", ONES * 1.0)),
        r"must have a weight_scale of F16 or BF16 or F32",
    ),
    (
        {**CT, "kind": "mx"},
        without(fp4({"kind": "mx"}), weight_scale=("U8", np.ones((64, 1), np.uint8))),
        r"must have a weight_scale of U8 or F8_E8M0 \[64, 2\]",
    ),
    (
        {**CT, "kind": "mx"},
        without(fp4({"kind": "mx"}), weight_packed=("U8", np.ones((64, 5), np.uint8))),
        r"has 10 columns, which are no groups of 32",
    ),
    (
        {"quant_method": "modelopt"},
        without(fp4({"kind": "opt"}), weight_scale_2=None),
        r"lacks its weight_scale_2",
    ),
]


@pytest.mark.parametrize(("settings", "quantize", "message"), WRONG)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], quantize: Quantizer, message: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, settings, quantize, message, SMALL)


def test_a_stack_of_experts_with_another_shape_is_refused(tmp_path: Path) -> None:
    config, _ = gpt_oss(tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    content: dict[str, Entry] = {
        key: ("U8" if array.dtype == np.uint8 else "F32", array) for key, array in stored.items()
    }
    content[name] = ("U8", stored[name][..., 0].copy())
    single(tmp_path / "m", content)
    with pytest.raises(
        CheckpointError, match=r"must have down_proj_blocks of U8 \[experts, outputs, groups, 16\]"
    ):
        locate(tmp_path / "m", config, parsing.tensor_names(config), views_for({"quant_method": "mxfp4"}))
