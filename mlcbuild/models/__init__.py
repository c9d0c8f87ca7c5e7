"""Models as data: what a checkpoint's config.json means, and what its tensors are called."""

from mlcbuild.models.action import normalise
from mlcbuild.models.config import (
    Activation,
    ModelConfig,
    Param,
    Rope,
    context_window,
    frequencies,
    parameters,
)
from mlcbuild.models.families import FAMILIES, aliases, parse, sources, surplus
from mlcbuild.models.serial import config_digest, from_json, to_json

__all__ = [
    "FAMILIES",
    "Activation",
    "ModelConfig",
    "Param",
    "Rope",
    "aliases",
    "config_digest",
    "context_window",
    "frequencies",
    "from_json",
    "normalise",
    "parameters",
    "parse",
    "sources",
    "surplus",
    "to_json",
]
