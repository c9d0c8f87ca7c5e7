"""Tests that the GGUF files of the golden checkpoints are read as the same models as the checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlcbuild.bundles.reference import logits
from mlcbuild.checkpoints import exact_weights
from mlcbuild.checkpoints.gguf_config import normalise, read_config
from mlcbuild.errors import CheckpointError
from mlcbuild.models import ModelConfig, parameters
from mlcbuild.models.action import read_json
from mlcbuild.models.parsing import parse, tensor_names
from tests import typegoldens
from tests.conftest import ROOT
from tests.gguf_files import write_gguf

GOLDEN = ROOT / "tests" / "golden"
SAME = (
    "llama-linear-bias",
    "llama-mha-tied",
    "llama-yarn",
    "mistral-window",
    "phi3-window",
    "qwen2-bias",
    "qwen3",
)
"""Names of the test checkpoints (tests/golden) whose config follows exactly from the metadata of the GGUF
files that are written from them."""
ROUNDED = ("llama-llama3-gqa", "phi3-longrope-long")
"""Names of the test checkpoints (tests/golden) whose rotary frequencies or attention factor are float32 in
the GGUF files that are written from them, so that they may differ in the last bits."""
TOKENS = [1, 5, 9, 2, 7, 30, 31, 3, 8, 64, 100, 12, 0, 17, 4, 99, 6, 7, 8, 9]


def model(variant: str) -> ModelConfig:
    return parse(read_json(GOLDEN / variant / "config.json"))


@pytest.mark.parametrize("variant", SAME)
def test_the_config_is_that_of_the_checkpoint(variant: str, tmp_path: Path) -> None:
    write_gguf(GOLDEN / variant, tmp_path / "m.gguf")
    assert read_config(tmp_path / "m.gguf") == model(variant)


@pytest.mark.parametrize("variant", ROUNDED)
def test_frequencies_are_those_of_the_checkpoint(variant: str, tmp_path: Path) -> None:
    write_gguf(GOLDEN / variant, tmp_path / "m.gguf")
    config, expected = read_config(tmp_path / "m.gguf"), model(variant)
    assert replace(config, ropes=()) == replace(expected, ropes=())
    for rope, expectation in zip(config.ropes, expected.ropes, strict=True):
        np.testing.assert_allclose(rope.inv_freq, expectation.inv_freq, rtol=1e-6)
        np.testing.assert_allclose(rope.inv_freq_long or 0, expectation.inv_freq_long or 0, rtol=1e-6)
        np.testing.assert_allclose(rope.attention_factor, expectation.attention_factor, rtol=1e-6)


@pytest.mark.parametrize("variant", [*SAME, *ROUNDED, "gemma2"])
def test_weights_are_those_of_the_checkpoint(variant: str, tmp_path: Path) -> None:
    write_gguf(GOLDEN / variant, tmp_path / "m.gguf")
    config = model(variant)
    names = tensor_names(config)
    read_values = exact_weights.checkpoint(tmp_path / "m.gguf", config, names)
    expected = exact_weights.checkpoint(GOLDEN / variant, config, names)
    assert list(read_values) == list(expected)
    for name, values in expected.items():
        if variant == "gemma2" and name.endswith("norm.weight"):
            # 1 was added in float32 when the file was written.
            np.testing.assert_allclose(read_values[name], values, rtol=0, atol=2**-23)
        else:
            np.testing.assert_array_equal(read_values[name], values)


@pytest.mark.parametrize("variant", ["llama-llama3-gqa", "phi3-longrope-long"])
def test_logits_are_those_of_the_checkpoint(variant: str, tmp_path: Path) -> None:
    write_gguf(GOLDEN / variant, tmp_path / "m.gguf")
    config = read_config(tmp_path / "m.gguf")
    computed = logits(
        config, exact_weights.checkpoint(tmp_path / "m.gguf", config, tensor_names(config)), TOKENS
    )
    expected = model(variant)
    other = exact_weights.checkpoint(GOLDEN / variant, expected, tensor_names(expected))
    np.testing.assert_allclose(computed, logits(expected, other, TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma", "granite"])
def test_other_types_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Checks the config and the weights of GGUF files of models with scalar factors, and with norms to whose
    weights llama.cpp adds 1 in the file."""
    golden = typegoldens.load(name, tmp_path)
    fields = {**typegoldens.CONFIGS[name], "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    write_gguf(tmp_path, tmp_path / "m.gguf")
    config = read_config(tmp_path / "m.gguf")
    assert config == parse(fields) == golden.config
    read_values = exact_weights.checkpoint(tmp_path / "m.gguf", config, tensor_names(config))
    for parameter, values in golden.weights.items():
        bound = 2.0**-22 if name == "gemma" and "norm" in parameter else 0
        np.testing.assert_allclose(read_values[parameter], values, rtol=0, atol=bound, err_msg=parameter)


_SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2e6,
}
LATER: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo2": {"head_dim": 6},
    "smollm3": {},
}
"""Model types for which the pattern of layers is not in the GGUF file, because llama.cpp derives it from the
architecture's name -> further fields of config.json."""


@pytest.mark.parametrize("name", LATER)
def test_patterns_of_layers_follow_from_the_architecture(name: str, tmp_path: Path) -> None:
    """Checks model types for which GGUF files do not state which layers have a window or rotary embeddings:
    this is derived from the architecture's name. Logits of llama.cpp for such files differ from ours only by
    the rounding of its float16 cache."""
    fields = {"model_type": name, **_SIZES, **LATER[name], "tie_word_embeddings": False}
    config, rng = parse(fields), np.random.default_rng(1)
    tensors: dict[str, Any] = {}
    names = tensor_names(config)
    for param in parameters(config):
        pieces = names.sources[param.name]
        rows = param.parts if len(pieces) > 1 else param.shape[:1]
        for piece, count in zip(pieces, rows, strict=True):
            tensors[piece.tensor] = rng.standard_normal((count, *param.shape[1:])).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    write_gguf(tmp_path, tmp_path / "m.gguf")
    assert read_config(tmp_path / "m.gguf") == config
    read_values = exact_weights.checkpoint(tmp_path / "m.gguf", config, names)
    expected = exact_weights.checkpoint(tmp_path, config, names)
    for parameter, values in expected.items():
        np.testing.assert_allclose(read_values[parameter], values, rtol=0, atol=2.0**-22, err_msg=parameter)


def test_gemma_2_takes_scale_and_caps_from_its_file(tmp_path: Path) -> None:
    write_gguf(GOLDEN / "gemma2", tmp_path / "m.gguf")
    fields = json.loads((GOLDEN / "gemma2" / "config.json").read_text())
    # The file does not hold query_pre_attn_scalar: it is the head size, but for the model of 27B.
    assert read_config(tmp_path / "m.gguf") == parse({**fields, "query_pre_attn_scalar": 12})


def test_the_action_writes_what_a_checkpoint_gives(tmp_path: Path) -> None:
    write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf")
    normalise({"file": "m.gguf"}, {"checkpoint": tmp_path}, tmp_path / "out")
    from mlcbuild.models.action import normalise as plain

    plain({}, {"checkpoint": GOLDEN / "qwen3"}, tmp_path / "plain")
    for name in ("config.json", "tensors.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_windows_of_olmo_3_are_refused(tmp_path: Path) -> None:
    write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf", metadata={"olmo2.attention.sliding_window": 16})
    text = (tmp_path / "m.gguf").read_bytes().replace(b"\x05\0\0\0\0\0\0\0qwen3", b"\x05\0\0\0\0\0\0\0olmo2")
    (tmp_path / "m.gguf").write_bytes(text.replace(b"qwen3.", b"olmo2."))
    with pytest.raises(CheckpointError, match=r"sliding_window: windows of OLMo 3 are not supported"):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["", "none", "linear"])
def test_an_attention_factor_of_1_changes_nothing(kind: str, tmp_path: Path) -> None:
    """Checks files such as those of Llama 3.1 that were converted with llama.cpp in July 2024."""
    scaling = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 2.0} if kind else {}
    write_gguf(GOLDEN / "llama-mha-tied", tmp_path / "a.gguf", metadata=scaling)
    factor = {"llama.rope.scaling.attn_factor": 1.0}
    write_gguf(GOLDEN / "llama-mha-tied", tmp_path / "b.gguf", metadata={**scaling, **factor})
    assert read_config(tmp_path / "b.gguf") == read_config(tmp_path / "a.gguf")


def test_the_row_order_of_llama_files_may_be_stated(tmp_path: Path) -> None:
    write_gguf(GOLDEN / "llama-mha-tied", tmp_path / "a.gguf")
    layout = {"llama.tensor_data_layout": "Meta AI original pth"}
    write_gguf(GOLDEN / "llama-mha-tied", tmp_path / "b.gguf", metadata=layout)
    assert read_config(tmp_path / "b.gguf") == read_config(tmp_path / "a.gguf")


FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "missing": ({}, ("llama.block_count",), "llama.block_count must be an integer above 0: it is missing"),
    "zero": ({"llama.block_count": 0}, (), "llama.block_count must be an integer above 0: found '0'"),
    "text": ({"llama.rope.freq_base": "big"}, (), "llama.rope.freq_base must be a number: found 'big'"),
    "experts": ({"llama.expert_count": 8}, (), "llama.expert_used_count must be an integer above 0: it is m"),
    "unknown": ({"llama.logit_scale": 2.0}, (), "the metadata key llama.logit_scale is not understood"),
    "architecture": (
        {"general.architecture": "lama"},
        (),
        "the GGUF architecture 'lama' is not supported; did you mean 'llama'?",
    ),
    "layout": ({"llama.tensor_data_layout": "x"}, (), "layout: must be 'Meta AI original pth'; use the ori"),
    "scaling": ({"llama.rope.scaling.type": "ntk"}, (), "'ntk' is not supported"),
    "factor": (
        {"llama.rope.scaling.attn_factor": 1.5},
        (),
        "llama.rope.scaling.attn_factor: must be 1 withou",
    ),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_metadata_that_describe_no_model(name: str, tmp_path: Path) -> None:
    metadata, without, sentence = FAULTS[name]
    write_gguf(GOLDEN / "llama-mha-tied", tmp_path / "m.gguf", metadata=metadata, without=without)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path / "m.gguf")
    assert sentence in str(caught.value) and str(caught.value).startswith(str(tmp_path / "m.gguf"))


def test_experts_of_an_architecture_without_any(tmp_path: Path) -> None:
    write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf", metadata={"qwen3.expert_count": 4})
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path / "m.gguf")
    assert str(caught.value) == (
        f"{tmp_path / 'm.gguf'}: qwen3.expert_count: no model of this architecture has experts; use the "
        "original checkpoint"
    )
