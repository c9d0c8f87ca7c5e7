"""Tests of GGUF files whose quantized values are kept as they are, from the recipe to the weights files of a
bundle."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild import models, pipeline, quant, recipe
from mlcbuild.build.graph import Step
from mlcbuild.checkpoints import conversion, exact_weights, gguf_tensors
from mlcbuild.checkpoints.fetch import Pinned
from mlcbuild.checkpoints.gguf_config import normalise
from mlcbuild.checkpoints.gguf_tensors import read_tensors
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.checkpoints.lock import Lock, Locked
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.checkpoints.stored_formats import choose
from mlcbuild.errors import CheckpointError, InputError
from mlcbuild.models import parameters
from mlcbuild.models.action import normalise as plain
from mlcbuild.models.parsing import parse, tensor_names
from mlcbuild.quant import Storage
from mlcbuild.quant.codebooks import CODEBOOKS
from tests.conftest import TINY
from tests.gguf_experts import write_model
from tests.gguf_files import write_gguf

RECIPE = """\
version: 1
models: {m: ./m.gguf}
quantizations: {same: as-is}
targets: [x86-64-v3]
"""


def scheme_of(directory: Path, text: str = RECIPE) -> Storage:
    """Writes a recipe with the text `text` to `directory`, and returns the quantization scheme of its only
    step that converts weights."""
    (directory / "recipe.yaml").write_text(text)
    graph = pipeline.build(recipe.load(directory / "recipe.yaml", inspect=lambda models: ()), Lock({})).graph
    (weights,) = (node for node in graph.nodes.values() if node.name.startswith("weights/"))
    assert isinstance(weights, Step)
    return quant.from_json(weights.params["scheme"])


def converted(directory: Path, scheme: Storage) -> None:
    """Runs the build actions that write the config and the packed weights of the GGUF file m.gguf in
    `directory`, to its subdirectories `config` and `weights`. scheme: quantization scheme of the weights."""
    inputs: Mapping[str, Path] = {"checkpoint": directory, "config": directory / "config"}
    normalise({"file": "m.gguf"}, inputs, directory / "config")
    conversion.convert({"scheme": quant.to_json(scheme), "file": "m.gguf"}, inputs, directory / "weights")


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "MXFP4", "F16", "BF16"])
def test_every_value_of_the_file_is_kept(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that every value of a GGUF file is kept: of vectors, of embeddings, and of matrices whose rows
    llama.cpp stores in another order. Rows are converted a few at a time."""
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 4096)
    write_gguf(TINY, tmp_path / "m.gguf", kind)
    scheme = scheme_of(tmp_path)
    converted(tmp_path, scheme)
    config = models.from_json(json.loads((tmp_path / "config" / "config.json").read_bytes()))
    unpacked = conversion.unpacked(tmp_path / "weights", config, scheme)
    exact = exact_weights.checkpoint(tmp_path / "m.gguf", config, tensor_names(config))
    assert list(unpacked) == list(exact)
    for name in exact:
        np.testing.assert_array_equal(unpacked[name], exact[name], err_msg=name)
    formats = {"F16": "f16", "BF16": "f32", "MXFP4": "mxfp4"}
    assert formats.get(kind, kind.lower()) in scheme.formats


EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}


def _random_tensors() -> dict[str, NDArray[np.float32]]:
    """Returns name -> random values, for all tensors of a checkpoint with the config EXPERTS."""
    config = parse(EXPERTS)
    rng, sizes = np.random.default_rng(3), dict[str, tuple[int, ...]]()
    for param in parameters(config):
        for piece in tensor_names(config).sources[param.name]:
            sizes[piece.tensor] = (piece.rows, *param.shape[1:][-1:])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("form", ["", "fused", "apart"])
def test_every_value_of_experts_is_kept(kind: str, form: str, tmp_path: Path) -> None:
    """Checks that the converted weights of experts equal, bit for bit, those that the package gguf reads from
    the file."""
    config = parse(EXPERTS)
    write_model(EXPERTS, _random_tensors(), tmp_path / "m.gguf", kind, form=form)
    scheme = scheme_of(tmp_path)
    converted(tmp_path, scheme)
    unpacked = conversion.unpacked(tmp_path / "weights", config, scheme)
    stacks = _stacks(tmp_path / "m.gguf")
    both = stacks.get("gate_up", None)
    gate_up = np.concatenate([stacks["gate"], stacks["up"]], axis=1) if both is None else both
    np.testing.assert_array_equal(unpacked["layers.0.mlp.experts.gate_up.weight"], gate_up)
    np.testing.assert_array_equal(unpacked["layers.0.mlp.experts.down.weight"], stacks["down"])
    for part in ("gate_up", "down"):
        stored = quant.scheme_for(scheme, f"layers.0.mlp.experts.{part}.weight").format
        assert stored == kind.lower()


@pytest.mark.parametrize("kind", sorted(CODEBOOKS))
def test_types_with_codebooks_are_quantized_again_and_the_run_says_so(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that a file of such a type, here with random codes, is stored in 4 bits, near the values that
    the package gguf reads, and that log and weights file name the type."""
    sizes = {"experts.gate_up": (3, 512, 256), "experts.down": (3, 256, 256)}
    write_model(EXPERTS, _random_tensors(), tmp_path / "m.gguf", kind)
    scheme = scheme_of(tmp_path)
    converted(tmp_path, scheme)
    remark = f"no format keeps the values of the type {kind}, so they are quantized again"
    assert f"note: {remark}\n" in capsys.readouterr().err
    header = read_header(tmp_path / "weights" / "weights-00001-of-00001.safetensors")
    assert header.metadata["source"] == remark
    unpacked = conversion.unpacked(tmp_path / "weights", parse(EXPERTS), scheme)
    stacks = _stacks(tmp_path / "m.gguf")
    exact = {"down": stacks["down"], "gate_up": np.concatenate([stacks["gate"], stacks["up"]], axis=1)}
    for part, values in exact.items():
        name = f"layers.0.mlp.experts.{part}.weight"
        assert quant.scheme_for(scheme, name).format == "q4l"
        stored = np.stack([np.asarray(unpacked[name][index]) for index in range(3)])
        assert stored.shape == sizes[f"experts.{part}"]
        error = np.linalg.norm(stored - values) / np.linalg.norm(values)
        assert 0 < error < 0.06, error


def test_a_type_with_a_codebook_that_is_stored_in_float32_is_not_quantized_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(EXPERTS, _random_tensors(), tmp_path / "m.gguf", "IQ2_XS")
    in_float32 = "same: {scheme: as-is, overrides: [{match: '*', scheme: q0f32}]}"
    converted(tmp_path, scheme_of(tmp_path, RECIPE.replace("same: as-is", in_float32)))
    assert "quantized again" not in capsys.readouterr().err
    assert "source" not in read_header(tmp_path / "weights" / "weights-00001-of-00001.safetensors").metadata


@pytest.mark.parametrize("scale", [np.array([0.25], np.float32), np.array([2.0, -0.5, 3.0], np.float32)])
def test_nvfp4_is_multiplied_by_the_scale_of_its_matrix(scale: NDArray[np.float32], tmp_path: Path) -> None:
    """Checks matrices whose scale is one number for all experts, or one for each."""
    more = {
        "blk.0.ffn_down_exps.scale": scale,
        "blk.0.ffn_down_exps.input_scale": np.array([7.0], np.float32),
    }
    write_model(EXPERTS, _random_tensors(), tmp_path / "m.gguf", "NVFP4", more=more)
    config = parse(EXPERTS)
    exact = exact_weights.checkpoint(tmp_path / "m.gguf", config, tensor_names(config))
    stored = exact["layers.0.mlp.experts.down.weight"]
    expected = _stacks(tmp_path / "m.gguf")["down"] * scale[:, None, None]
    np.testing.assert_array_equal(np.stack([np.asarray(stored[index]) for index in range(3)]), expected)


def test_a_scale_of_nvfp4_must_fit_the_matrices(tmp_path: Path) -> None:
    more = {"blk.0.ffn_down_exps.scale": np.array([1, 2], np.float32)}
    write_model(EXPERTS, _random_tensors(), tmp_path / "m.gguf", "NVFP4", more=more)
    with pytest.raises(
        CheckpointError, match=r"_exps\.scale' must have one F32 number for each matrix, found"
    ):
        read_tensors(tmp_path / "m.gguf")


def test_codebooks_need_the_package_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(EXPERTS, _random_tensors(), tmp_path / "m.gguf", "IQ2_XS")
    monkeypatch.setattr(gguf_tensors, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError) as error:
        read_tensors(tmp_path / "m.gguf")
    assert str(error.value) == (
        f"{tmp_path / 'm.gguf'}: the package gguf, which decodes its tensors of the types IQ2_XS, is not "
        "installed; pip install 'mlcbuild[gguf]', or use a file of another quantization, such as Q4_K_M"
    )


def _stacks(path: Path) -> dict[str, NDArray[np.float32]]:
    """Returns "gate", "up", "down" or "gate_up" -> the weights of that matrix for all experts of the first
    layer, as the package gguf reads them."""
    stacks, apart = {}, dict[str, list[NDArray[np.float32]]]()
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if match := re.fullmatch(r"blk\.0\.ffn_(\w+)_exps\.weight", tensor.name):
            stacks[match[1]] = values
        elif match := re.fullmatch(r"blk\.0\.ffn_(\w+)\.\d\.weight", tensor.name):
            apart.setdefault(match[1], []).append(values)
    return stacks | {kind: np.stack(experts) for kind, experts in apart.items()}


def test_a_file_that_changed_after_planning_is_refused(tmp_path: Path) -> None:
    write_gguf(TINY, tmp_path / "m.gguf", "Q8_0")
    scheme = scheme_of(tmp_path)
    write_gguf(TINY, tmp_path / "m.gguf", "F32")
    with pytest.raises(
        CheckpointError, match=r"tensor '.*' is F32, but was quantized when the recipe was rea"
    ):
        converted(tmp_path, scheme)


def test_the_types_of_parts_of_one_parameter(tmp_path: Path) -> None:
    """Checks that a fused parameter gets the type float32 if its parts have different types: in many files
    those of queries and keys differ from that of values."""
    write_gguf(TINY, tmp_path / "m.gguf", "Q8_0", types={"attn_v.weight": "F32"})
    config = models.from_json(json.loads(_config(tmp_path)))
    (source,) = (
        item
        for item in locate(tmp_path / "m.gguf", config, tensor_names(config))
        if item.param.name == "layers.0.attn.qkv.weight"
    )
    assert [piece.dtype for piece in source.pieces] == ["Q8_0", "Q8_0", "F32"]
    assert quant.scheme_for(scheme_of(tmp_path), source.param.name).format == "f32"


def _config(directory: Path) -> bytes:
    normalise({"file": "m.gguf"}, {"checkpoint": directory}, directory / "config")
    return (directory / "config" / "config.json").read_bytes()


def test_formats_of_a_file_that_is_not_here_are_chosen_by_a_step(tmp_path: Path) -> None:
    """Checks that a pinned file on a hub gives the same scheme and the same weights as a local copy of it."""
    write_gguf(TINY, tmp_path / "m.gguf", "Q8_0", types={"attn_v.weight": "Q4_1", "ffn_up.weight": "MXFP4"})
    text = RECIPE.replace("as-is", "{scheme: as-is, overrides: [{match: embed, scheme: q4f16_1}]}")
    there = HubSource("org/tiny", file="m.gguf")
    (tmp_path / "recipe.yaml").write_text(text.replace("./m.gguf", str(there)))
    lock = Lock({there: Locked("a" * 40, {"m.gguf": Pinned(1, "b" * 64)})})
    graph = pipeline.build(recipe.load(tmp_path / "recipe.yaml"), lock).graph
    step, weights = (graph.step(name) for name in ("formats/m/same", "weights/m/same/plain"))
    inputs = {"checkpoint": tmp_path, "config": tmp_path / "config"}
    normalise({"file": "m.gguf"}, inputs, tmp_path / "config")
    choose(step.params, inputs, tmp_path / "choice")
    conversion.convert(weights.params, {**inputs, "budget": tmp_path / "choice"}, tmp_path / "there")
    converted(tmp_path, scheme_of(tmp_path, text))
    for path in sorted((tmp_path / "weights").iterdir()):
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes()


def test_a_pinned_checkpoint_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    plain({}, {"checkpoint": TINY}, tmp_path / "config")
    with pytest.raises(CheckpointError, match=r"tiny: 'as-is' keeps the values of quantized tensors, and th"):
        choose({"overrides": []}, {"checkpoint": TINY, "config": tmp_path / "config"}, tmp_path / "choice")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            RECIPE.replace("./m.gguf", "./tiny"),
            "'as-is' keeps the values of quantized tensors, and this checkpoint has none; choose a scheme "
            "such as q4a8_1, or q0f16 for no quantization",
        ),
        (
            RECIPE.replace("as-is", "{scheme: q4a8_1, overrides: [{match: embed, scheme: as-is}]}"),
            "'as-is' cannot be an override; make it the scheme, and override the other parameters",
        ),
        (RECIPE.replace("same: as-is", "as-is: q4a8_1"), "'as-is' is a built-in scheme: give your own"),
    ],
)
def test_recipes_that_cannot_keep_values(text: str, message: str, tmp_path: Path) -> None:
    write_gguf(TINY, tmp_path / "m.gguf", "Q8_0")
    shutil.copytree(TINY, tmp_path / "tiny")
    with pytest.raises(InputError) as error:
        scheme_of(tmp_path, text)
    assert message in str(error.value)
