"""Reads adapter_config.json of PEFT: which numbers scale each matrix of a LoRA adapter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mlcbuild.checkpoints.checkpoint_kinds import ADAPTER_CONFIG
from mlcbuild.errors import CheckpointError
from mlcbuild.models.action import read_json
from mlcbuild.models.fields import show

T = TypeVar("T")
_NOTES = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout"),
    *("lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_type", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "bias"),
    *("ensure_weight_tying", "use_dora", "r", "lora_alpha", "use_rslora", "fan_in_fan_out"),
    *("rank_pattern", "alpha_pattern", "init_lora_weights"),
}
"""Fields of adapter_config.json that this module reads, or that do not affect the merged weights because they
describe training or repeat the names of tensors. Any other field is refused with a CheckpointError unless
its value is null, false, 0 or empty.
"""
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of the field init_lora_weights of a LoRA adapter's config with which PEFT does not change the base
model's own weights when training starts. Any other value is refused with a CheckpointError.
"""


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of a LoRA adapter that determine the factor of each module's update B A: alpha and rank,
    with exceptions for single modules, and flags for rsLoRA, DoRA and transposed matrices."""

    alpha: float
    rank: int
    by_root: bool = False
    """True if the product of the adapter's matrices is scaled by alpha / sqrt(rank) (rsLoRA); False for
    alpha / rank.
    """
    transposed: bool = False
    """True if the base model stores its matrices as [in, out] (fan_in_fan_out)."""
    dora: bool = False
    """True if the rows of a merged matrix are scaled to lengths that the adapter stores (DoRA)."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Regular expression for a module's name, or for what follows one of its dots -> rank of the two LoRA
    matrices of the modules that match it; of several expressions the first counts. Modules that no expression
    matches have the adapter's general rank, `rank`.
    """
    alphas: Mapping[str, float] = field(default_factory=dict)
    untied: frozenset[str] = frozenset()
    """Last parts of the names of modules, such as "embed_tokens", of which the adapter has copies that share
    no weights with other modules (modules_to_save without ensure_weight_tying)."""

    def rank_of(self, module: str) -> int:
        return _matching(self.ranks, module, self.rank)

    def scale(self, module: str) -> float:
        """Returns the factor by which the product B A of a module's two adapter matrices is multiplied: alpha
        / rank, or alpha / sqrt(rank) for rsLoRA, with the alpha and rank of this module. module: its dotted
        name.
        """
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def _matching(patterns: Mapping[str, T], module: str, default: T) -> T:
    """Returns the value of the first pattern that matches a module's whole name, or all that follows one of
    its dots, as PEFT does; `default` if none does. patterns: regular expression -> value.
    """
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Reads adapter_config.json in an adapter's directory, and returns the settings that it states. Raises
    CheckpointError if the file is missing or holds no JSON object, and for wrong or unsupported values, with
    all of these problems, one per line.
    """
    path = directory / ADAPTER_CONFIG
    values = read_json(path)
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{path}: must be a JSON object, found {show(values)}")
    problems = [f"{path}: {line}" for line in _problems(values)]
    if problems:
        raise CheckpointError("\n".join(problems))
    return AdapterConfig(
        float(values["lora_alpha"]),
        values["r"],
        bool(values.get("use_rslora")),
        bool(values.get("fan_in_fan_out")),
        bool(values.get("use_dora")),
        values.get("rank_pattern") or {},
        values.get("alpha_pattern") or {},
        _untied(values),
    )


def _untied(values: Mapping[str, Any]) -> frozenset[str]:
    modules = values.get("modules_to_save")
    if values.get("ensure_weight_tying") or not isinstance(modules, list):
        return frozenset()
    return frozenset(str(module).rpartition(".")[2] for module in modules)


def _problems(values: Mapping[str, Any]) -> list[str]:
    kind = values.get("peft_type")
    if kind != "LORA":
        return [f"peft_type: must be LORA, found {show(kind)}; merge it into its base with PEFT"]
    lines = []
    if not _is_rank(values.get("r")):
        lines.append(f"r: must be an integer from 1 to 65536, found {show(values.get('r'))}")
    if not _is_alpha(values.get("lora_alpha")):
        lines.append(f"lora_alpha: must be a finite number, found {show(values.get('lora_alpha'))}")
    for name in ("use_rslora", "fan_in_fan_out", "use_dora"):
        # null means false to PEFT; axolotl writes it.
        if not isinstance(values.get(name), bool | None):
            lines.append(f"{name}: must be true or false, found {show(values[name])}")
    for name, fits in (("rank_pattern", _is_rank), ("alpha_pattern", _is_alpha)):
        lines += _pattern_problems(name, values.get(name) or {}, fits)
    start = values.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        lines.append(
            f"init_lora_weights: {show(start)} changes the weights of the base, which this adapter does not "
            "hold; convert it to a plain LoRA adapter with PEFT's save_pretrained(convert_...)"
        )
    for name, value in values.items():
        if name not in _NOTES and value not in (None, False, 0, "", [], {}):
            lines.append(f"{name}: {show(value)} is not supported; merge the adapter with PEFT")
    return lines


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65536


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


MOST_STARS = 3
"""Maximum number of stars (*) in one regular expression for module names; one with more is refused with a
CheckpointError. Each star after the first makes matching about 7 times as slow."""


def _pattern_problems(name: str, patterns: object, fits: Any) -> list[str]:
    if not isinstance(patterns, Mapping):
        return [f"{name}: must be an object, found {show(patterns)}"]
    lines = []
    for pattern, value in patterns.items():
        if not fits(value):
            lines.append(f"{name}: '{pattern}' has the value {show(value)}, which is no such number")
        # A pattern must be a name or a short regular expression: one that backtracks could run for ever. Each
        # star after the first takes 7 times as long.
        is_short = re.fullmatch(r"[\w.^$*\\|()\[\]-]{1,200}", pattern) and pattern.count("*") <= MOST_STARS
        if not is_short or re.search(r"[*+)]\s*[*+]", pattern):
            lines.append(f"{name}: '{pattern}' is no name of modules")
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            lines.append(f"{name}: '{pattern}' is no regular expression ({error})")
    return lines
