"""The steps that choose formats for a model's weights and that pack them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from mlcbuild import quant
from mlcbuild.build.graph import Input, Step, StepDisplay
from mlcbuild.canon import Json
from mlcbuild.checkpoints.checkpoint_kinds import adapter_argument
from mlcbuild.prospect import PROCESS_MEMORY, Checkpoint
from mlcbuild.quant import choice, importance
from mlcbuild.quant.format import format_module
from mlcbuild.recipe import Variant
from mlcbuild.targets import target as targets
from mlcbuild.targets.backends import backend

MANY_CORES = 64
"""Number of cores that a step requests if it can use all cores of a machine."""
BUDGET_FILES = ("budget.json", "quantization.yaml")
"""Names of those files that are copied into bundles from the step which chooses schemes under a budget."""


def storage_of(variant: Variant) -> quant.Storage:
    """Returns the quantization scheme of a variant with the layout in which the device of its target stores
    weights.
    """
    return _stored_on(variant.target, variant.scheme)


@lru_cache(maxsize=4096)
def _stored_on(target: targets.Target, scheme: quant.Scheme) -> quant.Storage:
    """Returns a quantization scheme with the layout in which a target's device stores weights, cached
    because thousands of variants share few schemes and targets.
    """
    return backend(target).storage(scheme)


def checkpoint_inputs(checkpoint: Checkpoint) -> dict[str, Input]:
    """Returns argument of the action -> input, for the inputs that all steps have which read a checkpoint's
    weights.
    """
    adapters = {adapter_argument(i): Input(node.name) for i, node in enumerate(checkpoint.adapters)}
    return {"checkpoint": Input(checkpoint.node.name, checkpoint.kind.weights_files), **adapters}


def labels_of(variant: Variant) -> dict[str, str]:
    """Returns name of a parameter -> words, by which messages describe the parameters of a
    variant's steps.
    """
    return {"scheme": f"scheme {variant.quantization}", "target": f"target {variant.target.name}"}


def scheme_params(scheme: quant.Storage) -> dict[str, Json]:
    """Returns the step parameters that describe a quantization scheme, from which `quant.choice.scheme_of`
    reads it.
    """
    if scheme.candidates:
        return {"candidates": [quant.to_json(candidate) for candidate in scheme.candidates]}
    return {"scheme": quant.to_json(scheme)}


def weights_step(
    variant: Variant,
    checkpoint: Checkpoint,
    config: str,
    chosen: Mapping[str, Input],
    calibrated: str | None = None,
) -> Step:
    """Returns the step that quantizes and writes a checkpoint's weights. config: name of the config step;
    chosen: {"budget": input from the step that chose a format for each matrix}, or {} without a budget;
    calibrated: name of the step that measured the importance of columns, or None. The report of that step
    does not enter the key.
    """
    measured = {}
    if calibrated is not None:
        measured[importance.INPUT] = Input(calibrated, (importance.IMPORTANCE,))
    scheme = storage_of(variant)
    return Step(
        f"weights/{checkpoint.name}/{variant.quantization}/{scheme.layout}",
        "mlcbuild.checkpoints.conversion:convert",
        {**scheme_params(scheme), **checkpoint.weights_params},
        {"config": Input(config), **checkpoint_inputs(checkpoint), **chosen, **measured},
        code=(*map(format_module, scheme.formats), *checkpoint.code),
        display=StepDisplay(labels_of(variant)),
        cores=MANY_CORES,
        memory=checkpoint.largest * 3 + PROCESS_MEMORY,
    )


def choice_input(budget: str) -> dict[str, Input]:
    """Returns argument of the action -> input, by which a step reads the choice of the step `budget`. The
    other files of that step do not enter its key.
    """
    return {choice.INPUT: Input(budget, (choice.CHOICE,))}


def formats_step(variant: Variant, checkpoint: Checkpoint, config: str) -> Step:
    """Returns the step that chooses the formats for `as-is` by the types of a checkpoint's tensors. config:
    name of the config step.
    """
    scheme = storage_of(variant)
    overrides: list[Json] = [[pattern, other.name] for pattern, other in scheme.overrides]
    return Step(
        f"formats/{checkpoint.name}/{variant.quantization}",
        "mlcbuild.checkpoints.stored_formats:choose",
        {**scheme_params(scheme), "overrides": overrides, **checkpoint.params},
        {"config": Input(config), **checkpoint_inputs(checkpoint)},
        code=(*map(format_module, scheme.formats), *checkpoint.code),
        memory=PROCESS_MEMORY,
    )


def exact_step(
    name: str,
    action: str,
    variant: Variant,
    checkpoint: Checkpoint,
    inputs: Mapping[str, Input],
    prompts: Path | tuple[str, ...],
) -> Step:
    """Returns a step that evaluates a model's exact weights on prompts. inputs: argument of the action -> its
    input, without the checkpoint's.
    """
    return Step(
        name,
        action,
        {
            "prompts": prompts.name if isinstance(prompts, Path) else list(prompts),
            "context_window": variant.limits.context_window,
            **checkpoint.weights_params,
        },
        {**inputs, **checkpoint_inputs(checkpoint)},
        code=checkpoint.code,
        cores=MANY_CORES,
        memory=checkpoint.largest * 3 + (1 << 30),
    )


def sensitivity_step(variant: Variant, checkpoint: Checkpoint, config: str, reference: str) -> Step:
    """Returns the step that measures the loss of each matrix in each candidate scheme of the variant's
    budget. config, reference: names of the steps that it reads.
    """
    name, action = f"sensitivity/{checkpoint.name}", "mlcbuild.bundles.sensitivity:sensitivity"
    return _evaluation(name, action, variant, checkpoint, {"config": config, "reference": reference}, {})


def budget_step(
    variant: Variant, checkpoint: Checkpoint, config: str, reference: str, sensitivity: str
) -> Step:
    """Returns the step that chooses a scheme for each matrix under the variant's budget. config, reference,
    sensitivity: names of the steps that it reads.
    """
    name = f"budget/{checkpoint.name}/{variant.quantization}"
    budget, steps = variant.scheme.budget, {"config": config, "reference": reference}
    assert budget is not None
    params = {"kind": budget.kind, "limit": repr(budget.limit), "name": variant.quantization}
    steps["sensitivity"] = sensitivity
    return _evaluation(name, "mlcbuild.bundles.budget:budget", variant, checkpoint, steps, params)


def _evaluation(
    name: str,
    action: str,
    variant: Variant,
    checkpoint: Checkpoint,
    steps: Mapping[str, str],
    params: Mapping[str, Json],
) -> Step:
    """Returns a step that evaluates a model with quantized weights. steps: argument of the action -> name
    of the step that it reads.
    """
    scheme = storage_of(variant)
    return Step(
        name,
        action,
        {
            "context_window": variant.limits.context_window,
            **scheme_params(scheme),
            **checkpoint.weights_params,
            **params,
        },
        {**{argument: Input(step) for argument, step in steps.items()}, **checkpoint_inputs(checkpoint)},
        code=(*map(format_module, scheme.formats), *checkpoint.code),
        cores=MANY_CORES,
        # The weights of a layer and the table of logits, beside a residual stream for each trial of a layer.
        memory=checkpoint.largest * 12 + (2 << 30),
    )
