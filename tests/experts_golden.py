"""Loads the goldens of models with experts: random checkpoints, and the logits that transformers computes
with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcbuild.models import ModelConfig, TensorNames, parameters, parsing
from tests import make_experts

FOLDER = Path(__file__).parent / "golden"
VARIANTS = sorted(path.stem.removeprefix("experts-") for path in FOLDER.glob("experts-*.safetensors"))
Array = NDArray[Any]


@dataclass(frozen=True)
class Golden:
    """A tiny random checkpoint of a model with experts, and the logits that transformers computes with it."""

    values: dict[str, Any]
    """The model's config.json, as a JSON object."""
    config: ModelConfig
    tensors: dict[str, NDArray[np.float32]]
    """The tensors of the checkpoint: name -> float32 values."""
    tokens: list[int]
    logits: NDArray[np.float32]
    """Logits that transformers computes, [tokens, vocab]."""

    @property
    def weights(self) -> dict[str, Array]:
        return gathered(self.config, parsing.tensor_names(self.config), self.tensors)

    @property
    def tolerance(self) -> float:
        """Returns the largest allowed difference of logits: 1e-4 of the range of the golden logits."""
        return 1e-4 * float(np.ptp(self.logits))


def gathered(config: ModelConfig, names: TensorNames, tensors: dict[str, Any]) -> dict[str, Array]:
    """Returns parameter name -> its values, read from the tensors of a checkpoint."""
    by_name = {}
    for param in parameters(config):
        pieces = [tensors[piece.tensor] for piece in names.sources[param.name]]
        by_name[param.name] = np.concatenate(pieces).reshape(param.shape)
    return by_name


def golden(variant: str) -> Golden:
    data = (FOLDER / f"experts-{variant}.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    about = header.pop("__metadata__")
    by_name = {}
    for name, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        dtype = {"F32": "<f4", "I64": "<i8"}[entry["dtype"]]
        by_name[name] = np.frombuffer(data[first:last], dtype).reshape(entry["shape"])
    values = json.loads(about["config"])
    tensors = make_experts.contents(variant, json.loads(about["shapes"]))
    tokens = [int(token) for token in by_name["tokens"]]
    return Golden(values, parsing.parse(values, variant), tensors, tokens, by_name["logits"])
