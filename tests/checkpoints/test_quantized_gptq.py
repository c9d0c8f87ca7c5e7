"""Tests of checkpoints in GPTQ and AWQ formats, compared with the values of their packages and with (code -
zero) * scale in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild import pipeline, recipe
from mlcbuild.build.graph import Step
from mlcbuild.checkpoints import conversion
from mlcbuild.checkpoints.checkpoint_views import views_for
from mlcbuild.checkpoints.fetch import Pinned
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.lock import Lock, Locked
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.checkpoints.quantization import module_of
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.errors import CheckpointError
from mlcbuild.models import parsing
from tests.checkpoint_files import Entry
from tests.conftest import ROOT
from tests.quantized_files import (
    RECIPE,
    SMALL,
    Floats,
    Parts,
    Quantizer,
    check,
    check_converted,
    check_refused,
    kept,
    quantized,
)

Ints = NDArray[np.int64]


def packed(codes: Ints, bits: int) -> NDArray[np.int32]:
    """Packs each column of `codes` [count, columns] into int32 words [count * bits / 32, columns], the first
    code in the lowest bits. Each column is computed as one long Python integer. bits: bits of a code."""
    words = np.empty((codes.shape[0] * bits // 32, codes.shape[1]), np.uint32)
    for column in range(codes.shape[1]):
        number = sum(int(code) << (bits * i) for i, code in enumerate(codes[:, column]))
        words[:, column] = [number >> (32 * i) & 0xFFFFFFFF for i in range(len(words))]
    return words.view(np.int32)


def half(random: np.random.Generator, *shape: int) -> NDArray[np.float16]:
    return np.exp(random.standard_normal(shape) - 5).astype(np.float16)


def gptq(
    bits: int = 4, group: int = 32, stored_less: int = 1, symmetric: bool = False, order: str | None = None
) -> Quantizer:
    """Returns a function that quantizes a matrix in the GPTQ format. The mean of its codes is the zero point,
    as with real weights, whose mean is about zero."""

    def quantize(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        group_ = columns if group < 0 else group
        groups = -(-columns // group_)
        top = (1 << bits) - 1
        low, high = (top + 1) // 2, (top + 1) // 2 + 1
        zeros = random.integers(
            low if symmetric else max(1, low - 2), high if symmetric else min(top, low + 2), (groups, rows)
        )
        places = np.arange(columns) // group_
        if order == "act":
            places = random.permutation(places)
        codes = (
            np.rint(zeros[places] + random.standard_normal((columns, rows)) * top / 6)
            .clip(0, top)
            .astype(np.int64)
        )
        scales = half(random, groups, rows)
        values = (codes - zeros[places]).astype(np.float64) * scales.astype(np.float64)[places]
        stored = (zeros - stored_less) & top
        parts: dict[str, Entry] = {
            "qweight": ("I32", packed(codes, bits)),
            "qzeros": ("I32", packed(stored.T, bits).T.copy()),
            "scales": ("F16", scales),
        }
        if order:
            parts["g_idx"] = "I32", (0 * places if order == "zeros" else places).astype(np.int32)
        return parts, values.astype(np.float32).T

    return quantize


def awq(group: int = 32) -> Quantizer:
    def words(codes: Ints) -> NDArray[np.int32]:
        out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * place)
        return out.view(np.int32)

    def quantize(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        codes = random.integers(0, 16, (columns, rows))
        zeros = random.integers(0, 16, (columns // group, rows))
        scales = half(random, columns // group, rows)
        places = np.arange(columns) // group
        values = (codes - zeros[places]).astype(np.float64) * scales.astype(np.float64)[places]
        parts: dict[str, Entry] = {
            "qweight": ("I32", words(codes)),
            "qzeros": ("I32", words(zeros)),
            "scales": ("F16", scales),
        }
        return parts, values.astype(np.float32).T

    return quantize


GOLDEN = ROOT / "tests" / "golden" / "packed"
GPTQ, AWQ = {"quant_method": "gptq"}, {"quant_method": "awq"}


@pytest.mark.parametrize("package", ["gptq", "awq"])
def test_values_are_those_of_the_package(package: str) -> None:
    """Checks that files which auto-gptq and autoawq have packed are read with the values of these
    packages."""
    stored = {tensor.name: tensor for tensor in read_header(GOLDEN / f"{package}.safetensors").tensors}
    expected = {name: stored.pop(name) for name in list(stored) if name.endswith(".values")}
    for bits in (2, 3, 4, 8) if package == "gptq" else (4,):
        parts = {name: item for name, item in stored.items() if name.startswith(f"{bits}.")}
        weight = import_module(module_of(package)).view({}, parts)[f"{bits}.weight"]
        with Rows() as rows:
            values = rows.values(expected[f"{bits}.values"], 0, 64)
            np.testing.assert_array_equal(rows.values(weight, 0, 64), values, err_msg=str(bits))
            np.testing.assert_array_equal(rows.values(weight, 5, 30), values[5:35], err_msg=str(bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("order", [None, "act"])
def test_gptq_of_every_width(bits: int, version: int, order: str | None, tmp_path: Path) -> None:
    settings = {**GPTQ, "bits": bits, "checkpoint_format": ["gptq", "gptq_v2"][version - 1]}
    values = quantized(tmp_path, settings, gptq(bits, 32, 2 - version, order=order))
    check(tmp_path, settings, values)


@pytest.mark.parametrize(("group", "order"), [(-1, None), (64, "zeros"), (32, "plain"), (48, None)])
def test_groups_of_other_sizes(group: int, order: str | None, tmp_path: Path) -> None:
    """Checks that GPTQ checkpoints with groups of 32, 48 or 64 weights, or one group per row, are read with
    the values that were quantized. A file whose stored group index is 0 for all columns is read as one whose
    groups follow the order of the columns."""
    settings = {**GPTQ, "group_size": group}
    check(tmp_path, settings, quantized(tmp_path, settings, gptq(4, group, order=order)))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("named", "less"), [("gptq", 0), ("gptq_v2", 1), (None, 0)])
def test_the_version_is_that_of_the_values(
    symmetric: bool, named: str | None, less: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**GPTQ, "checkpoint_format": named}
    values = quantized(tmp_path, settings, gptq(4, 32, less, symmetric))
    check(tmp_path, settings, values)
    how = "less 1 (version 1)" if less else "as they are (version 2)"
    assert f"q_proj.weight: GPTQ with zero points stored {how}, since" in capsys.readouterr().err


@pytest.mark.parametrize("group", [32, 64])
def test_awq(group: int, tmp_path: Path) -> None:
    check(tmp_path, AWQ, quantized(tmp_path, AWQ, awq(group)))


@pytest.mark.parametrize(("settings", "quantize"), [(GPTQ, gptq(3, 32, order="act")), (AWQ, awq())])
def test_rows_are_read_a_few_at_a_time(
    settings: dict[str, Any], quantize: Quantizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converts a GPTQ or AWQ checkpoint in chunks of a few rows, and checks the values. The chunks begin and
    end within a 32-bit word that packs codes of several rows."""
    values = quantized(tmp_path, settings, quantize)
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 3000)
    check_converted(tmp_path, settings, values, SMALL)


FORMATS: list[tuple[dict[str, Any], Quantizer, str]] = [
    (GPTQ, gptq(4, 64, symmetric=True), "q4_0"),
    (GPTQ, gptq(4, -1, symmetric=True), "q4_0"),
    (GPTQ, gptq(2), "q4_0"),
    (GPTQ, gptq(3), "q4_0"),
    (GPTQ, gptq(8, 32, symmetric=True), "q8_0"),
    (GPTQ, gptq(4), "q5_0"),
    (GPTQ, gptq(8), "f32"),
    (GPTQ, gptq(4, 32, order="act"), "f32"),
    (GPTQ, gptq(4, 16), "f32"),
    (AWQ, awq(64), "q5_0"),
]


@pytest.mark.parametrize(("settings", "quantize", "form"), FORMATS)
def test_values_are_kept_in_the_smallest_format(
    settings: dict[str, Any], quantize: Quantizer, form: str, tmp_path: Path
) -> None:
    quantized(tmp_path / "m", settings, quantize)
    assert kept(tmp_path)["layers.0.attn.o.weight"] == form
    metadata = read_header(tmp_path / "out" / "weights-00001-of-00001.safetensors").metadata
    source = metadata.get("source", "")
    assert ("no format below float32 holds its values exactly" in source) == (form == "f32")
    assert ("GPTQ with zero points stored less 1 (version 1), since" in source) == (settings is GPTQ)


def test_only_the_reader_of_its_method_is_in_the_key_of_a_local_checkpoint(tmp_path: Path) -> None:
    """Checks that the key of a local checkpoint's weights contains the source file of its quantization method
    only. For a checkpoint on a hub, whose config.json is not known yet, it contains all of them."""
    quantized(tmp_path / "m", AWQ, awq())
    source = 'models: {m: ./m, h: "hf://org/name@' + "0" * 40 + '"}'
    text = RECIPE.replace("models: {m: ./m}", source).replace("as-is", "q4a8_1")
    (tmp_path / "recipe.yaml").write_text(text)
    loaded = recipe.load(tmp_path / "recipe.yaml")
    (hub,) = pipeline.hub_sources(loaded)
    files = {name: Pinned(1, "0" * 64) for name in ("config.json", "tokenizer.json", "model.safetensors")}
    graph = pipeline.build(loaded, Lock({hub: Locked("0" * 40, files)})).graph
    code = {
        name.split("/")[1]: {module.rpartition(".")[2] for module in node.code if "quantized" in module}
        for name, node in graph.nodes.items()
        if name.startswith("weights/") and isinstance(node, Step)
    }
    assert code["m"] == {"awq_reader"}
    assert {"awq_reader", "gptq_reader", "mlx_reader"} < code["h"]


def changed(quantize: Quantizer, part: str, change: Callable[[Entry], Entry | None]) -> Quantizer:
    def other(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        parts, values = quantize(random, rows, columns)
        entry = change(parts[part])
        rest = {name: item for name, item in parts.items() if name != part}
        return rest if entry is None else {**rest, part: entry}, values

    return other


def far(entry: Entry) -> Entry:
    return entry[0], (entry[1].astype(np.int32) + 9).astype(np.int32)


WRONG: list[tuple[dict[str, Any], Quantizer, str]] = [
    (
        {**GPTQ, "checkpoint_format": "marlin"},
        gptq(),
        r"checkpoint_format marlin cannot be read; it must be gptq",
    ),
    ({**AWQ, "version": "GEMV"}, awq(), r"version gemv cannot be read; it must be gemm"),
    (GPTQ, changed(gptq(), "scales", lambda entry: None), r"module 'model.*q_proj' lacks its scales"),
    (GPTQ, changed(gptq(), "qzeros", lambda entry: None), r"module 'model.*q_proj' lacks its qzeros"),
    (
        GPTQ,
        changed(gptq(), "qzeros", lambda entry: ("I32", entry[1][:, :1].copy())),
        r"has 64 outputs and qz",
    ),
    (
        GPTQ,
        changed(gptq(), "scales", lambda entry: ("I16", entry[1].view(np.int16))),
        r"must have a scales of F",
    ),
    (
        GPTQ,
        changed(gptq(4, 32, order="act"), "g_idx", far),
        r"has the group 10 in g_idx, but scales of 2 groups",
    ),
    (
        AWQ,
        changed(awq(), "qzeros", lambda entry: ("I32", entry[1][:1].copy())),
        r"must have a qzeros of I32 or",
    ),
    (
        AWQ,
        changed(awq(), "qweight", lambda entry: ("I32", entry[1].reshape(-1))),
        r"must have a matrix as its q",
    ),
]


@pytest.mark.parametrize(("settings", "quantize", "message"), WRONG)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], quantize: Quantizer, message: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, settings, quantize, message)


def test_groups_that_do_not_fill_the_columns(tmp_path: Path) -> None:
    def quantize(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Floats]:
        parts, values = awq(16)(random, rows, columns)
        return {
            name: (code, array[: len(array) - 1]) if name != "qweight" else (code, array)
            for name, (code, array) in parts.items()
        }, values

    wide = {**SMALL, "hidden_size": 160, "num_attention_heads": 5}
    quantized(tmp_path, AWQ, quantize, wide)
    config = parsing.parse(wide)
    with pytest.raises(CheckpointError, match=r"has 160 columns, which 9 groups of one size do not fill"):
        locate(tmp_path, config, parsing.tensor_names(config), views_for(AWQ))


@pytest.mark.skipif(sys.byteorder == "big", reason="words are little-endian in files")
def test_the_three_words_of_32_codes_of_3_bits() -> None:
    """Checks how 32 codes of 3 bits are packed into three words: codes 10 and 21 cross a word border, as in
    AutoGPTQ's own packing."""
    codes = np.arange(32)[:, None] % 8
    words = packed(codes, 3).view(np.uint32)[:, 0]
    stored_words = np.zeros(3, np.uint64)
    for i in range(10):
        stored_words[0] |= np.uint64(int(codes[i, 0]) << (3 * i))
        stored_words[1] |= np.uint64(int(codes[11 + i, 0]) << (3 * i + 1))
        stored_words[2] |= np.uint64(int(codes[22 + i, 0]) << (3 * i + 2))
    stored_words[0] |= np.uint64((int(codes[10, 0]) << 30) & 0xFFFFFFFF)
    stored_words[1] |= np.uint64(int(codes[10, 0]) >> 2 & 1)
    stored_words[1] |= np.uint64((int(codes[21, 0]) << 31) & 0xFFFFFFFF)
    stored_words[2] |= np.uint64(int(codes[21, 0]) >> 1 & 3)
    np.testing.assert_array_equal(words, stored_words.astype(np.uint32))
