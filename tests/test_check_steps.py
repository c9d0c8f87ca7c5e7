"""Tests of the steps that compare a bundle with its exact model and measure its speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild import check_steps, machine, prospect, recipe
from mlcbuild.bundles.verify import THRESHOLDS
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.documents.document import Place
from mlcbuild.recipe import Bench
from tests.conftest import project

RECIPE = """\
version: 1
models: {tiny: ./tiny}
quantizations: [q4f16_1]
targets: [x86-64-v3]
verify: {prompts: [one], max_kl: 0.25}
"""


def test_limits_of_verification_are_exact_texts(tmp_path: Path) -> None:
    """Checks that the limits of a verification are in the parameters of its step, which enter the cache key:
    a limit as text, since keys hold no floats, and an absent limit as null."""
    loaded = recipe.load(project(tmp_path, RECIPE))
    (variant,) = recipe.expand(loaded)
    checkpoint = prospect.examined(loaded, [variant], Lock())["tiny"]
    step = check_steps.verify_step(variant, checkpoint, "bundle/b", "reference/r")
    assert step.params == dict.fromkeys(THRESHOLDS) | {"max_kl": "0.25"}
    assert {name: each.node for name, each in step.inputs.items()} == {
        "bundle": "bundle/b",
        "reference": "reference/r",
    }
    assert not step.alone and step.shared


def test_speed_holds_for_one_kind_of_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (variant,) = recipe.expand(recipe.load(project(tmp_path, RECIPE)))
    monkeypatch.setattr(machine, "kind", lambda: "Some Processor, 8 cores")
    step = check_steps.bench_step(variant, Bench(64, 16, Place("recipe.yaml", 1, 1)), "bundle/b")
    assert step.params["machine"] == "Some Processor, 8 cores"
    assert (step.params["prompt_tokens"], step.params["generate_tokens"]) == (64, 16)
    assert step.alone and not step.shared, "no other step disturbs it, and no other machine gets it"
    assert machine.label("Some Processor, 8 cores") in step.needs
