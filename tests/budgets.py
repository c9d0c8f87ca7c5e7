"""Inputs of budget steps for tests: the loss that each scheme causes in each matrix of the embedded model,
and the formats that a budget chooses from these losses."""

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
    """Returns the inputs of a budget step for the embedded model and two short prompts."""
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
