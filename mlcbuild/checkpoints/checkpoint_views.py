"""Chooses the functions (views) that turn the tensors stored in a checkpoint into the tensors of its model.

Modules are loaded by name, so that a step's key depends only on the code that its checkpoint needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mlcbuild.canon import Json
from mlcbuild.checkpoints.checkpoint_kinds import LORA, adapter_argument
from mlcbuild.checkpoints.mapping import PLAIN, Views
from mlcbuild.checkpoints.quantization import method_of, module_of, read_settings


def views_of(params: Mapping[str, Json], inputs: Mapping[str, Path]) -> Views:
    """Returns the two functions, from name -> tensor to name -> tensor, that turn the stored tensors of a
    step's checkpoint into those of its model: one dequantizes, if the checkpoint is quantized, and one merges
    LoRA adapters, if the step has any. Adapters are not read before the function is called.

    inputs["config"]: output of the config step, which states how the checkpoint is quantized.
    params["adapters"]: the factor of each adapter's change to the weights, a number as a string;
    inputs["adapter-1"] and so on: directories of the adapters. Raises CheckpointError for an unknown
    quantization method.
    """
    views = views_for(read_settings(inputs["config"]))
    factors: Any = params.get("adapters", [])
    directories = [(inputs[adapter_argument(i)], float(factor)) for i, factor in enumerate(factors)]
    if not directories:
        return views
    return replace(views, adapted=partial(import_module(LORA).merging, directories))


def views_for(settings: object) -> Views:
    """Returns the functions that turn a checkpoint's stored tensors into those of its model, by the
    quantization_config in its config.json: they dequantize, or return tensors unchanged if `settings` is None
    (not quantized). Raises CheckpointError if it is no object or states a method that no module reads.
    """
    if settings is None:
        return PLAIN
    module = import_module(module_of(method_of(settings, "config.json")))
    return Views(quantized=partial(module.view, settings))
