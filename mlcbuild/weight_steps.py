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
"""Maximum number of CPU cores for a step that can use all cores of a machine. It gets fewer on a smaller
machine, or while other steps run."""
BUDGET_FILES = ("budget.json", "quantization.yaml")
"""Names of the two files that bundles copy from the step which chose their quantization schemes under a
budget: the report on the choice, and the choice as text to copy into a recipe."""


def storage_of(variant: Variant) -> quant.Storage:
    """Returns the quantization scheme of a variant with the layout in which the device of its target stores
    weights. Raises UsageError for a format for which the device has no kernels.
    """
    return _stored_on(variant.target, variant.scheme)


@lru_cache(maxsize=4096)
def _stored_on(target: targets.Target, scheme: quant.Scheme) -> quant.Storage:
    """Returns a quantization scheme with the layout in which a target's device stores weights, cached because
    thousands of variants share few schemes and targets. Raises UsageError for a format for which the device
    has no kernels."""
    return backend(target).storage(scheme)


def checkpoint_inputs(checkpoint: Checkpoint) -> dict[str, Input]:
    """Returns the inputs of a build step that reads a checkpoint's weights: name of an argument of the step's
    action -> `Input`, which names the step or source whose files are passed. The arguments are "checkpoint",
    and "adapter-1", "adapter-2" and so on for the LoRA adapters."""
    adapters = {adapter_argument(i): Input(node.name) for i, node in enumerate(checkpoint.adapters)}
    return {"checkpoint": Input(checkpoint.node.name, checkpoint.kind.weights_files), **adapters}


def labels_of(variant: Variant) -> dict[str, str]:
    """Returns the words with which messages describe two parameters of a variant's build steps: {"scheme":
    "scheme NAME", "target": "target NAME"}, such as "scheme q4"."""
    return {"scheme": f"scheme {variant.quantization}", "target": f"target {variant.target.name}"}


def scheme_params(scheme: quant.Storage) -> dict[str, Json]:
    """Returns the parameters of a build step that describe a quantization scheme: {"scheme": the scheme as
    JSON}, or {"candidates": list of such schemes} if a step chooses among several."""
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
    """Returns the build step that quantizes a checkpoint's weights and writes them. config: name of the step
    with the model's config; chosen: {"budget": input from the step that chose a format for each matrix}, or
    {} if no step did; calibrated: name of the step that measured the importance of matrix columns, or None if
    there is no such step. The key of the weights covers the importance, not the other files of the step
    `calibrated`. Raises UsageError for a format for which the variant's device has no kernels."""
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
    """Returns the input of a step that reads which format another step, named `budget`, chose for each
    matrix of a model: {"budget": `Input` of that step's file choice.json}, by the name of the argument of the
    action. The key of the reading step covers no other file of the step `budget`."""
    return {choice.INPUT: Input(budget, (choice.CHOICE,))}


def formats_step(variant: Variant, checkpoint: Checkpoint, config: str) -> Step:
    """Returns the step that chooses stored formats for the quantization `as-is`, which keeps the values of a
    quantized checkpoint: for each matrix the smallest format that holds them exactly, unless an override
    states its format. config: name of the step that reads the model's config. Raises UsageError for a format
    for which the variant's device has no kernels."""
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
    """Returns a build step that evaluates a model on prompts with its exact weights, as they are before
    quantization. name, action: name of the step, and of its function as "module:function"; inputs: name of an
    argument of the action -> `Input`, except for the checkpoint's, which are added; prompts: the texts of the
    prompts, or the file with them, which must then be among `inputs`, since only the file's name becomes a
    parameter."""
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
    """Returns the step that measures, for each matrix and each candidate scheme of a variant's budget, how
    much the model's output changes (mean KL divergence) if only this matrix is quantized. config, reference:
    names of the steps with the model's config and with the logits of its exact weights. Raises UsageError for
    a format for which the variant's device has no kernels."""
    name, action = f"sensitivity/{checkpoint.name}", "mlcbuild.bundles.sensitivity:sensitivity"
    return _evaluation(name, action, variant, checkpoint, {"config": config, "reference": reference}, {})


def budget_step(
    variant: Variant, checkpoint: Checkpoint, config: str, reference: str, sensitivity: str
) -> Step:
    """Returns the step that chooses a scheme for each matrix under the budget (a maximum of bits per weight,
    bytes or loss) that the variant's scheme must have. config, reference, sensitivity: names of the steps
    with the model's config, the logits of its exact weights, and the loss of each matrix in each scheme.
    Raises UsageError for a format for which the variant's device has no kernels."""
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
    """Returns a step that evaluates a model with quantized weights. steps: name of an argument of the action
    -> name of the step whose files are passed as this argument; params: further parameters of the action.
    Raises UsageError for a format for which the variant's device has no kernels."""
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
