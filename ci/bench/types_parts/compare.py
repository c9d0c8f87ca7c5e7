"""Compares mlcbuild's logits for a checkpoint that transformers wrote with those of transformers."""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from types_parts.library import compiled

from mlcbuild.bundles import reference
from mlcbuild.checkpoints import exact_weights
from mlcbuild.errors import MlcbuildError
from mlcbuild.models import ModelConfig, parsing

CHUNKS = ((0, 7), (7, 24), (24, None))


class RefusedError(Exception):
    """The error for a checkpoint whose config.json or weights mlcbuild refuses."""


def errors(area: Path, tokens: list[int], expected: Any, libraries: bool) -> dict[str, float]:
    """Compares mlcbuild's logits with transformers'. Returns way of computing, such as "config, reference" or
    "config, chunks" -> largest difference of a logit, divided by the largest absolute value of the expected
    logits. The config.json that transformers saves with the checkpoint has entries of its own, "saved config,
    reference" and so on, if it describes another model.

    area: directory with the checkpoint that transformers wrote; tokens: the prompt; expected: transformers'
    logits; libraries: True if compiled libraries are tested, too. Raises RefusedError if mlcbuild refuses the
    config.json or the weights. If it refuses only the config that transformers saves, an entry with the
    reason as its key and the value 0 says so.
    """
    largest: dict[str, float] = {}
    configs: dict[str, ModelConfig] = {}
    reasons = []
    for name, path in (("config", area / "config.json"), ("saved config", area / "saved" / "config.json")):
        try:
            configs[name] = parsing.parse(json.loads(path.read_text()), name)
        except MlcbuildError as refusal:
            reasons.append(str(refusal))
    if "config" not in configs:
        raise RefusedError(" | ".join(reasons[:1]))
    span = float(np.abs(expected).max()) or 1.0
    last = None
    for name, config in configs.items():
        if config == last:
            continue
        last = config
        try:
            with redirect_stderr(StringIO()):  # it lists surplus tensors
                read = exact_weights.checkpoint(area / "saved", config, parsing.tensor_names(config))
        except MlcbuildError as refusal:
            raise RefusedError(str(refusal)) from None
        weights = {parameter: np.asarray(values) for parameter, values in read.items()}
        logits = reference.logits(config, weights, tokens, dtype=np.float64)
        largest[f"{name}, reference"] = float(np.abs(logits - expected).max()) / span
        if libraries:
            largest |= {
                f"{name}, {way}": worst / span
                for way, worst in _library(area, config, weights, tokens, expected)
            }
    if reasons:
        largest[f"refused the config that transformers saves: {reasons[0]}"] = 0.0
    return largest


def _library(area: Path, config: ModelConfig, weights: Any, tokens: list[int], expected: Any) -> Any:
    """Compiles a model and computes the same tokens in three ways. Yields (way, largest absolute difference
    of a logit from `expected`): "whole" computes them in one call, "chunks" in several, "tokens" one by one
    by decode steps. A NaN counts as an infinite difference. weights: those of the model; area: directory for
    the library.
    """
    session = compiled(area, config, weights)
    yield "whole", worst(session.prefill((0, tokens)), expected)
    chunks = [session.prefill((1, tokens[start:end])) for start, end in CHUNKS]
    yield "chunks", worst(np.concatenate(chunks), expected)
    steps = [session.decode((2, token)) for token in tokens]
    yield "tokens", worst(np.concatenate(steps), expected)


def worst(logits: Any, expected: Any) -> float:
    return float(np.nan_to_num(np.abs(logits - expected), nan=np.inf).max())
