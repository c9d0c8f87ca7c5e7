"""Tests of checkpoints in MLX's affine formats and in those of bitsandbytes, compared with these packages and
with the formats' definitions."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mlcbuild.checkpoints import conversion
from mlcbuild.checkpoints.checkpoint_views import views_for
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.checkpoints.quantization import module_of
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.models import parsing
from tests.checkpoint_files import Entry
from tests.conftest import ROOT
from tests.quantized_files import ODD, SMALL, Floats, Parts, Quantizer, check, check_refused, kept, quantized
from tests.schemes import SCHEMES

GOLDEN = ROOT / "tests" / "golden" / "tables"
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_threshold": 6.0}


@pytest.mark.parametrize("package", ["mlx", "bitsandbytes"])
def test_values_are_those_of_the_package(package: str) -> None:
    stored = {tensor.name: tensor for tensor in read_header(GOLDEN / f"{package}.safetensors").tensors}
    names = [name.removesuffix(".values") for name in stored if name.endswith(".values")]
    reader = import_module(module_of(package))
    for name in names:
        parts = {other: item for other, item in stored.items() if other.startswith(f"{name}.")}
        expected = parts.pop(f"{name}.values")
        settings = {"bits": int(name), "group_size": 32} if package == "mlx" else BNB
        weight = reader.view(settings, parts)[f"{name}.weight"]
        with Rows() as rows:
            actual, other = (rows.values(tensor, 0, tensor.shape[0]) for tensor in (weight, expected))
            np.testing.assert_array_equal(actual, other, err_msg=name)
            np.testing.assert_array_equal(rows.values(weight, 5, 3), other[5:8], err_msg=name)
    assert len(names) == {"mlx": 6, "bitsandbytes": 4}[package]


def mlx_settings(bits: int, group: int) -> dict[str, Any]:
    return {"bits": bits, "group_size": group}


def mlx(bits: int, group: int, code: str = "F16") -> Quantizer:
    def quantize(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        codes = random.integers(0, 1 << bits, (rows, columns))
        numbers = []
        for factor in (1, -(1 << bits) / 2):
            wide = (factor * np.exp(random.standard_normal((rows, columns // group)) - 5)).astype(np.float32)
            numbers.append(wide.astype(np.float16) if code == "F16" else wide.astype(ml_dtypes.bfloat16))
        scale, bias = (item.astype(np.float32).repeat(group, 1) for item in numbers)
        flags = (codes[..., None] >> np.arange(bits) & 1).reshape(rows, -1).astype(np.uint8)
        packed = np.packbits(flags, axis=1, bitorder="little").view(np.uint32)
        parts: dict[str, Entry] = {
            "weight": ("U32", packed),
            "scales": (code, numbers[0].view(np.uint16)),
            "biases": (code, numbers[1].view(np.uint16)),
        }
        return parts, codes.astype(np.float32) * scale + bias

    return quantize


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("group", "code"), [(32, "F16"), (64, "BF16")])
def test_mlx(bits: int, group: int, code: str, tmp_path: Path) -> None:
    settings = mlx_settings(bits, group)
    check(tmp_path, settings, quantized(tmp_path, settings, mlx(bits, group, code)))


def test_modules_of_mlx_with_bits_of_their_own(tmp_path: Path) -> None:
    settings = mlx_settings(4, 64)
    modules = [
        f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "self_attn.o_proj")
    ]
    modules += [f"model.layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("gate", "down")]
    settings |= {module: {"bits": 8, "group_size": 32} for module in modules}
    check(tmp_path, settings, quantized(tmp_path, settings, mlx(8, 32)))


@pytest.mark.parametrize(("bits", "form"), [(2, "q4_1"), (4, "q4_1"), (5, "q5_1"), (6, "q8_1"), (8, "f32")])
def test_values_of_mlx_are_kept(bits: int, form: str, tmp_path: Path) -> None:
    quantized(tmp_path / "m", mlx_settings(bits, 64), mlx(bits, 64))
    assert kept(tmp_path)["layers.0.attn.o.weight"] == form


def text(value: object) -> Entry:
    return "U8", np.frombuffer(json.dumps(value).encode(), np.uint8)


def bnb(nested: bool = False, block: int = 64, kind: str = "nf4", **change: object) -> Quantizer:
    def quantize(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        count = rows * columns
        codes, table = random.integers(0, 16, count), np.sort(random.standard_normal(16)).astype(np.float32)
        scale = np.exp(random.standard_normal(-(-count // block)) - 3).astype(np.float32)
        state: dict[str, object] = {"quant_type": kind, "blocksize": block, "shape": [rows, columns]}
        parts: dict[str, Entry] = {
            "weight": ("U8", (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
            "weight.quant_map": ("F32", table),
            "weight.absmax": ("F32", scale),
        }
        if nested:
            levels, raw = random.standard_normal(256).astype(np.float32), random.integers(0, 256, len(scale))
            top = random.standard_normal(-(-len(scale) // 256)).astype(np.float32)
            scale = levels[raw] * top.repeat(256)[: len(scale)] + np.float32(0.5)
            state |= {"nested_blocksize": 256, "nested_offset": 0.5, "nested_dtype": "float32"}
            parts |= {
                "weight.absmax": ("U8", raw.astype(np.uint8)),
                "weight.nested_absmax": ("F32", top),
                "weight.nested_quant_map": ("F32", levels),
            }
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = text({**state, **change})
        return parts, (table[codes] * scale.repeat(block)[:count]).reshape(rows, columns)

    return quantize


def int8(layout: int = 0) -> Quantizer:
    def quantize(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        codes = random.integers(-127, 128, (rows, columns)).astype(np.int8)
        scale = np.exp(random.standard_normal(rows)).astype(np.float32)
        parts: dict[str, Entry] = {
            "weight": ("I8", codes),
            "SCB": ("F32", scale),
            "weight_format": ("U8", np.array(layout, np.uint8)),
        }
        return parts, codes.astype(np.float32) * scale[:, None] * np.float32(7.874015718698502e-3)

    return quantize


@pytest.mark.parametrize("quantize", [bnb(), bnb(True), bnb(True, 128, "fp4"), int8()])
@pytest.mark.parametrize("fields", [SMALL, ODD])
def test_bitsandbytes(quantize: Quantizer, fields: dict[str, Any], tmp_path: Path) -> None:
    """Checks the formats of bitsandbytes with rows of 136 columns, so that blocks extend over the ends of
    rows."""
    check(tmp_path, BNB, quantized(tmp_path, BNB, quantize, fields))


def test_rows_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {**ODD, "intermediate_size": 131}
    values = quantized(tmp_path, BNB, bnb(True), odd)
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 3000)
    config = parsing.parse(odd)
    sources = locate(tmp_path, config, parsing.tensor_names(config), views_for(BNB))
    conversion.write(sources, SCHEMES["q0f32"], tmp_path / "out", 2)
    unpacked = conversion.unpacked(tmp_path / "out", config, SCHEMES["q0f32"])
    down = values["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(unpacked["layers.1.mlp.down.weight"], down)


def without(quantize: Quantizer, **change: Entry | None) -> Quantizer:
    def other(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        parts, values = quantize(random, rows, columns)
        names = {part.replace("__", "."): entry for part, entry in change.items()}
        return {part: entry for part, entry in {**parts, **names}.items() if entry is not None}, values

    return other


STATE = "weight.quant_state.bitsandbytes__nf4"
WRONG: list[tuple[dict[str, Any], Quantizer, str]] = [
    (
        mlx_settings(8, 64),
        mlx(4, 64),
        r"has 8 words and 1 groups in a row, which are not what its bits and gro",
    ),
    (mlx_settings(4, 0), mlx(4, 64), r"which are not what its bits and group_size say: 4 and 0"),
    (
        {**mlx_settings(4, 64), "mode": "nvfp4"},
        mlx(4, 64),
        r"the mode nvfp4 cannot be read; convert the model",
    ),
    (mlx_settings(4, 64), without(mlx(4, 64), biases=None), r"q_proj' lacks its biases"),
    (BNB, int8(1), r"is stored in the layout of a GPU; save the model with format row"),
    (BNB, bnb(shape=[1, 1, 1]), r"has a quant_state with the shape \[1, 1, 1\]"),
    (BNB, bnb(shape=[1 << 40, 64]), r"has a quant_state with the shape"),
    (BNB, bnb(blocksize=0), r"has a quant_state with the blocksize \[0\]"),
    (BNB, bnb(True, nested_offset=None), r"has a quant_state without a nested_offset"),
    (BNB, bnb(shape=[32, 64]), r"must have a weight of U8 \[1024, 1\]"),
    (
        BNB,
        without(bnb(), **{STATE: ("U8", np.zeros(9, np.uint8))}),
        r"has a quant_state that is no JSON object",
    ),
    (
        BNB,
        without(bnb(), **{STATE: ("U8", np.zeros(9999, np.uint8))}),
        r"has a quant_state of U8 \[9999\], which",
    ),
]


@pytest.mark.parametrize(("settings", "quantize", "message"), WRONG)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], quantize: Quantizer, message: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, settings, quantize, message, SMALL)
