"""Tests of the steps that choose formats for a model's weights and that pack them: what enters their keys."""

from __future__ import annotations

from pathlib import Path

from mlcbuild import prospect, quant, recipe, weight_steps
from mlcbuild.build.graph import Input
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.prospect import Checkpoint
from mlcbuild.quant import choice, importance
from mlcbuild.recipe import Variant
from tests.conftest import project

RECIPE = """\
version: 1
models: {tiny: ./tiny}
quantizations: {plain: q4f16_1, small: {target_bits: 5}}
targets: [x86-64-v3]
compile: {context_window: 96}
"""


def variants(directory: Path) -> dict[str, tuple[Variant, Checkpoint]]:
    """Returns name of a quantization in RECIPE -> (the recipe's variant with this quantization, the model's
    checkpoint). directory: where the recipe is written."""
    loaded = recipe.load(project(directory, RECIPE))
    expanded = recipe.expand(loaded)
    checkpoints = prospect.examined(loaded, expanded, Lock())
    return {variant.quantization: (variant, checkpoints["tiny"]) for variant in expanded}


def test_weights_are_named_after_scheme_and_layout_and_read_what_was_chosen(tmp_path: Path) -> None:
    variant, checkpoint = variants(tmp_path)["plain"]
    step = weight_steps.weights_step(variant, checkpoint, "config/tiny", {})
    storage = weight_steps.storage_of(variant)
    assert step.name == f"weights/tiny/plain/{storage.layout}"
    assert step.params == {"scheme": quant.to_json(storage), **checkpoint.weights_params}
    assert step.display.labels == {"scheme": "scheme plain", "target": "target x86-64-v3"}
    assert set(step.inputs) == {"config", "checkpoint"}
    assert step.inputs["checkpoint"].select == checkpoint.kind.weights_files, "no other file is in the key"


def test_reports_of_steps_before_do_not_enter_the_key_of_weights(tmp_path: Path) -> None:
    variant, checkpoint = variants(tmp_path)["plain"]
    chosen = weight_steps.choice_input("budget/tiny/small")
    step = weight_steps.weights_step(variant, checkpoint, "config/tiny", chosen, "calibrate/tiny")
    assert step.inputs[choice.INPUT] == Input("budget/tiny/small", (choice.CHOICE,))
    assert step.inputs[importance.INPUT] == Input("calibrate/tiny", (importance.IMPORTANCE,))


def test_a_budget_is_chosen_from_what_its_candidates_lose(tmp_path: Path) -> None:
    variant, checkpoint = variants(tmp_path)["small"]
    losses = weight_steps.sensitivity_step(variant, checkpoint, "config/tiny", "reference/tiny")
    choosing = weight_steps.budget_step(variant, checkpoint, "config/tiny", "reference/tiny", losses.name)
    assert losses.name == "sensitivity/tiny" and choosing.name == "budget/tiny/small"
    assert choosing.inputs["sensitivity"] == Input("sensitivity/tiny")
    assert set(choosing.params) - set(losses.params) == {"kind", "limit", "name"}
    assert (choosing.params["kind"], choosing.params["limit"]) == ("target_bits", "5.0")
    assert losses.params["context_window"] == 96
    storage = weight_steps.storage_of(variant)
    assert len(storage.candidates) > 1
    assert losses.params["candidates"] == [quant.to_json(candidate) for candidate in storage.candidates]


def test_exact_weights_are_evaluated_on_prompts_of_the_recipe(tmp_path: Path) -> None:
    variant, checkpoint = variants(tmp_path)["plain"]
    inputs = {"config": Input("config/tiny")}
    for prompts, expected in ((("a", "b"), ["a", "b"]), (tmp_path / "p.txt", "p.txt")):
        step = weight_steps.exact_step("reference/tiny", "m:f", variant, checkpoint, inputs, prompts)
        assert step.params["prompts"] == expected and step.params["context_window"] == 96
        assert step.memory > checkpoint.largest * 3
