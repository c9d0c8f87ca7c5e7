"""Tests of the NumPy forward pass: its logits are compared with those of transformers, and computing a text
in pieces with computing it at once."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcbuild.bundles import reference, reference_blocks
from mlcbuild.bundles.reference import EMPTY, Reference, greedy, head, hidden
from mlcbuild.bundles.reference_blocks import Array
from mlcbuild.errors import CheckpointError
from mlcbuild.models import ModelConfig, RmsNorm, Rope, aliases, parameters, parsing
from mlcbuild.models.parsing import parse
from tests.configs import with_attention, with_feed_forward, with_windows

GOLDEN = Path(__file__).parent.parent / "golden"
VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
DTYPES = [np.float32, np.float64]
STORY = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "models" / "story"


def tensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Returns (tensor name -> array, metadata) of a safetensors file, read by the description of the format
    only."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    by_name: dict[str, Array] = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        raw = data[start + first : start + last]
        if entry["dtype"] == "BF16":
            value = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            value = np.frombuffer(raw, {"F32": "<f4", "I64": "<i8"}[entry["dtype"]])
        by_name[name] = value.reshape(entry["shape"])
    return by_name, metadata


def logits(model: Reference, tokens: Any) -> Array:
    return reference.logits(
        model.config, model.weights, tokens, dtype=model.dtype, context_window=model.context_window
    )


def load(folder: Path) -> tuple[ModelConfig, dict[str, Array]]:
    config = parse(json.loads((folder / "config.json").read_text()))
    stored = tensors(folder / "model.safetensors")[0]
    for name, other in aliases(config).items():
        stored.setdefault(name, stored.get(other, np.empty(0)))
    return config, {
        name: np.concatenate([stored[part.tensor] for part in parts])
        for name, parts in parsing.tensor_names(config).sources.items()
    }


@cache
def golden(variant: str) -> tuple[Reference, Array, Array]:
    """Returns a test checkpoint of tests/golden: (model with float32 weights, token ids [n], logits that
    transformers computes [n, vocab])."""
    config, weights = load(GOLDEN / variant)
    expected, metadata = tensors(GOLDEN / variant / "golden.safetensors")
    model = Reference(config, weights, context_window=int(metadata["context_window"]))
    return model, expected["tokens"], expected["logits"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, dtype: type[np.float32] | type[np.float64]) -> None:
    model, tokens, expected = golden(variant)
    logits_read = logits(replace(model, dtype=dtype), tokens)
    assert logits_read.dtype == dtype
    assert logits_read.shape == expected.shape
    assert np.abs(logits_read - expected).max() < 3e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_with_a_cache_give_what_the_whole_gives(variant: str) -> None:
    model, tokens, _ = golden(variant)
    model = replace(model, dtype=np.float64)
    past, actual, start = EMPTY, [], 0
    for count in (17, 1, 1, 22, 20):
        states, past = hidden(model, tokens[start : start + count], past)
        start += count
        assert past.length == start
        actual.append(head(model, states))
    assert start == len(tokens)
    assert np.abs(np.concatenate(actual) - logits(model, tokens)).max() < 1e-12


def without_long(rope: Rope) -> Rope:
    return replace(rope, inv_freq_long=None, long_factor=None, original_max_position=None)


def slower(rope: Rope) -> Rope:
    return replace(rope, inv_freq=tuple(value * 0.9 for value in rope.inv_freq))


def with_rope(config: ModelConfig, rope: Rope) -> ModelConfig:
    return replace(config, ropes=(rope,))


def without_offset(config: ModelConfig) -> ModelConfig:
    """Returns a config in which all norms are plain RMS norms, which add nothing to their weights."""
    norm = RmsNorm(config.norm.eps)
    layers = tuple(
        replace(layer, norms=replace(layer.norms, before=norm, after=norm)) for layer in config.layers
    )
    return replace(config, layers=layers, norm=norm)


MUTATIONS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "gemma2 windows": lambda c: with_windows(c, None, None, None),
    "gemma2 window + 1": lambda c: with_windows(c, 10, None, 10),
    "gemma2 order of windows": lambda c: with_windows(c, None, 9, None),
    "gemma2 attention_softcap": lambda c: with_attention(c, softcap=None),
    "gemma2 logit_softcap": lambda c: replace(c, logit_softcap=None),
    "gemma2 norm_offset": without_offset,
    "gemma2 scale": lambda c: with_attention(c, scale=c.layers[0].mixer.head_dim ** -0.5),
    "gemma2 embedding_scale": lambda c: replace(c, embedding_scale=1.0),
    "gemma2 activation": lambda c: with_feed_forward(c, activation="silu"),
    "gemma2-bf16 embedding_scale": lambda c: replace(c, embedding_scale=c.hidden_size**0.5),
    "llama-llama3-gqa rope": lambda c: with_rope(c, slower(c.ropes[0])),
    "llama-yarn attention_factor": lambda c: with_rope(c, replace(c.ropes[0], attention_factor=1.0)),
    "mistral-window windows": lambda c: with_windows(c, 14, 14),
    "qwen2-window windows": lambda c: with_windows(c, 11, 11, 11),
    "phi3-window windows": lambda c: with_windows(c, None, None),
    "phi3-longrope-long rope": lambda c: with_rope(c, without_long(c.ropes[0])),
    "phi3-longrope-short rope": lambda c: with_rope(c, replace(c.ropes[0], original_max_position=32)),
    "phi3-longrope-short factor": lambda c: with_rope(c, replace(c.ropes[0], attention_factor=1.0)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_feature_shows_in_its_golden(mutation: str) -> None:
    """Checks that changing one feature of a test model's config changes the logits that NumPy computes. The
    stored logits of transformers would therefore reveal a feature that is not computed."""
    model, tokens, expected = golden(mutation.split(maxsplit=1)[0])
    changed = replace(model, config=MUTATIONS[mutation](model.config))
    assert np.abs(logits(changed, tokens) - expected).max() > 3e-3


def test_biases_and_head_norms_show_in_their_goldens() -> None:
    for variant, ends in {
        "llama-linear-bias": ("qkv.bias", "o.bias", "gate_up.bias", "down.bias"),
        "qwen2-bias": ("qkv.bias",),
        "qwen3": ("q_norm.weight", "k_norm.weight"),
    }.items():
        model, tokens, expected = golden(variant)
        for end in ends:
            flat = {
                name: np.full_like(value, end.endswith("weight")) if name.endswith(end) else value
                for name, value in model.weights.items()
            }
            assert np.abs(logits(replace(model, weights=flat), tokens) - expected).max() > 1e-2, end


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, _ = golden("gemma2")
    model = replace(model, dtype=np.float64)
    whole = logits(model, tokens)
    monkeypatch.setattr(reference_blocks, "BLOCK", 700)
    assert np.abs(logits(model, tokens) - whole).max() < 1e-12


def test_greedy_follows_the_largest_logit() -> None:
    model, tokens, _ = golden("llama-llama3-gqa")
    prompt = [int(token) for token in tokens[:5]]
    actual = greedy(model, prompt, 12)
    for i, token in enumerate(actual):
        assert token == int(logits(model, prompt + actual[:i])[-1].argmax())
    stop = actual[3]
    assert greedy(model, prompt, 12, {stop}) == actual[: actual.index(stop) + 1]
    assert greedy(model, prompt, 0) == []


class Lazy(Mapping[str, Array]):
    """A mapping that creates each weight when it is read, and counts how many existed at one time."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self.weights = weights
        self.handed: list[weakref.ref[Any]] = []
        self.reads: list[str] = []
        self.alive = 0

    def __getitem__(self, name: str) -> Array:
        actual = self.weights[name].copy()
        self.handed = [ref for ref in self.handed if ref() is not None] + [weakref.ref(actual)]
        self.alive = max(self.alive, len(self.handed))
        self.reads.append(name)
        return actual

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def test_weights_are_read_when_needed_and_not_kept() -> None:
    model, tokens, expected = golden("gemma2")
    lazy = Lazy(model.weights)
    logits_read = logits(replace(model, weights=lazy), tokens)
    assert np.abs(logits_read - expected).max() < 3e-5
    assert lazy.alive <= 3
    assert sorted(lazy.reads) == sorted([*model.weights, "embed.weight"])  # tied, so it is read twice


def test_weights_may_come_in_another_dtype() -> None:
    model, tokens, expected = golden("llama-mha-tied")
    half = {name: value.astype(np.float16) for name, value in model.weights.items()}
    logits_read = logits(replace(model, weights=half), tokens)
    assert logits_read.dtype == np.float32
    assert 1e-5 < np.abs(logits_read - expected).max() < 0.05


def test_without_a_context_window_the_models_own_counts() -> None:
    model, tokens, expected = golden("phi3-longrope-long")
    assert np.abs(logits(replace(model, context_window=None), tokens) - expected).max() < 3e-5


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "at least one integer"),
        ([0.5], "at least one integer"),
        ([[1, 2]], "at least one integer"),
        ([0, 203], r"0\.\.202"),
        ([-1], r"0\.\.202"),
    ],
)
def test_wrong_tokens_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logits(golden("llama-mha-tied")[0], tokens)


def test_wrong_weights_are_refused() -> None:
    model, tokens, _ = golden("llama-mha-tied")
    name = "layers.1.mlp.down.weight"
    fewer = {key: value for key, value in model.weights.items() if key != name}
    with pytest.raises(CheckpointError, match=f"hold no '{name}'"):
        logits(replace(model, weights=fewer), tokens)
    with pytest.raises(CheckpointError, match=rf"'{name}' must have shape \(36, 72\), found \(72, 36\)"):
        logits(replace(model, weights={**model.weights, name: model.weights[name].T}), tokens)


@pytest.mark.skipif(not STORY.is_dir(), reason="../shared/models/story is not beside this checkout")
def test_a_trained_model_is_sure_of_itself() -> None:
    config, weights = load(STORY)
    assert {param.name: param.shape for param in parameters(config)} == {
        name: value.shape for name, value in weights.items()
    }
    model = Reference(config, weights)
    results = [1, *greedy(model, [1], 60)]
    scores = logits(model, results).astype(np.float64)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    output = chances[np.arange(len(results) - 1), results[1:]]
    # Random weights would give ln(2048) = 7.6.
    assert -np.log(output).mean() < 2.0
