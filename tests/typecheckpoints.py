"""Tiny random checkpoints of every model type, each with a tokenizer, and the KL divergence of the model's
logits that quantizing them causes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlcbuild.bundles import reference
from mlcbuild.checkpoints import conversion, exact_weights
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.models import parsing
from mlcbuild.quant import Storage
from tests import experts_golden, typegoldens
from tests.checkpoint_files import entry, save

CHARACTERS = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"
"""The characters for which the tests' tokenizer has tokens. With its three special tokens they fit the
smallest vocabulary of the tested model types, 71 tokens."""
FOLDERS = {
    "gemma2": "gemma2",
    "llama": "llama-llama3-gqa",
    "mistral": "mistral-window",
    "phi3": "phi3-window",
    "qwen2": "qwen2-window",
    "qwen3": "qwen3",
}
"""Model type -> name of the directory in tests/golden that has its tiny checkpoint."""
STACKS = {name.partition("-")[0]: name for name in experts_golden.VARIANTS}
"""Model type (of models with experts) -> name of the golden file, below tests/golden, from which its tiny
checkpoint is generated."""


def write(name: str, area: Path) -> Path:
    """Writes a tiny checkpoint of the model type `name`, with a tokenizer, to the new directory `area`, and
    returns the directory."""
    if name in FOLDERS:
        shutil.copytree(typegoldens.HERE / FOLDERS[name], area)
    else:
        area.mkdir(parents=True)
        tensors: dict[str, Any]
        if name in typegoldens.CONFIGS:
            config, tensors = typegoldens.CONFIGS[name], typegoldens.stored(name)[0]
        else:
            golden = experts_golden.golden(STACKS[name])
            config, tensors = golden.values, golden.tensors
        (area / "config.json").write_text(json.dumps(config))
        save(
            area / "model.safetensors",
            {tensor_name: entry(value, "F32") for tensor_name, value in tensors.items()},
        )
    (area / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (area / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return area


def tokenizer() -> dict[str, Any]:
    """Returns a tokenizer.json with a token for each character."""
    special = ("<unk>", "<s>", "</s>")
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": content, **kind} for i, content in enumerate(special)],
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[piece, 0.0] for piece in (*special, *CHARACTERS)],
        },
    }


Logits = np.ndarray[Any, np.dtype[Any]]
TOKENS = [3 + number * 31 % len(CHARACTERS) for number in range(20)]


def exact_logits(checkpoint: Path, texts: Sequence[Sequence[int]] = (TOKENS,)) -> list[Logits]:
    """Returns the logits of a checkpoint's unquantized weights for each text, float64 [tokens, vocabulary].
    texts: the tokens of each text."""
    config = parsing.parse(json.loads((checkpoint / "config.json").read_text()), checkpoint.name)
    weights = exact_weights.checkpoint(checkpoint, config, parsing.tensor_names(config))
    return [reference.logits(config, weights, tokens, dtype=np.float64) for tokens in texts]


def loss(
    checkpoint: Path,
    scheme: Storage,
    area: Path,
    texts: Sequence[Sequence[int]] = (TOKENS,),
    exact: Sequence[Logits] | None = None,
) -> float:
    """Returns the mean KL divergence, in nats, that converting a checkpoint to a scheme causes in its logits,
    computed in float64. area: directory for the weights files; texts: the tokens of each text; exact: the
    texts' logits with unquantized weights, which are computed here by default."""
    config = parsing.parse(json.loads((checkpoint / "config.json").read_text()), checkpoint.name)
    conversion.write(locate(checkpoint, config, parsing.tensor_names(config)), scheme, area)
    rounded = conversion.unpacked(area, config, scheme)
    divergences = []
    for tokens, logits in zip(texts, exact or exact_logits(checkpoint, texts), strict=True):
        p = _log_softmax(logits)
        q = _log_softmax(reference.logits(config, rounded, tokens, dtype=np.float64))
        divergences.append((np.exp(p) * (p - q)).sum(-1))
    return float(np.concatenate(divergences).mean())


def _log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


LIMITS = {
    "q0f32": 0.0,
    "q0f16": 1e-3,
    **dict.fromkeys(("q8f32_1", "q8f16_1", "q8a8_1"), 0.2),
    **dict.fromkeys(("q5a8_1", "q5a8_2", "q6a8_2"), 0.5),
    **dict.fromkeys(("q4f32_1", "q4f16_1", "q4a8_1", "q4a8_2"), 2.0),
    "q3a8_2": 4.0,
}
"""Scheme -> largest allowed divergence, in nats, on these checkpoints, whose weights are random.

Rounding may change which expert a router chooses. With float16 weights that cost one of 20 tokens 6e-3, and
the others 1e-7.
"""
