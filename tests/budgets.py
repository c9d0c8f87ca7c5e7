"""Fixtures and helpers for tests of the step that chooses a format for each matrix within a budget of bits or
of loss: the losses that each format causes in the embedded model's matrices, and the choices that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlcbuild import quant
from mlcbuild.bundles.budget import budget
from mlcbuild.bundles.sensitivity import sensitivity
from tests.bundles.test_verify import prompts_reference
from tests.conftest import TINY
from tests.schemes import SCHEMES

NAMES = ("q4a8_1", "q5a8_1", "q8a8_1")
PARAMS: dict[str, Any] = {
    "candidates": [quant.to_json(SCHEMES[name]) for name in NAMES],
    "context_window": None,
    "name": "small",
}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns argument name -> path of the inputs of the step that chooses formats for a limit of bits or
    loss: config, checkpoint, and reference logits of two short prompts of the embedded model, and the
    measured loss of each format in each matrix."""
    directory = tmp_path_factory.mktemp("budget")
    logits = prompts_reference(directory, ["What is 12 + 30?", "reverse stone"])
    first = {"config": directory / "config", "checkpoint": TINY, "reference": logits}
    (directory / "sensitivity").mkdir()
    sensitivity(PARAMS, first, directory / "sensitivity")
    return {**first, "sensitivity": directory / "sensitivity"}


def chosen(inputs: dict[str, Path], out: Path, kind: str, limit: float) -> dict[str, Any]:
    out.mkdir(parents=True)
    budget({**PARAMS, "kind": kind, "limit": repr(limit)}, inputs, out)
    document: dict[str, Any] = json.loads((out / "budget.json").read_bytes())
    return document
