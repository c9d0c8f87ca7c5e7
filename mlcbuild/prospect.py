"""Examines the checkpoints of a recipe before anything runs, and checks that its variants fit them.

Of a local checkpoint the config is read; of a pinned one only the lock's list of files is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

from mlcbuild import quant
from mlcbuild.build.graph import Node, Source, Step
from mlcbuild.canon import Json
from mlcbuild.checkpoints.checkpoint_kinds import GGUF, SAFETENSORS, CheckpointKind
from mlcbuild.checkpoints.fetch import local_files
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import CheckpointError, InputError, Problem, Problems, SourceError, UsageError
from mlcbuild.models import ModelConfig, Param, config_digest, context_window, parameters
from mlcbuild.models.action import read_json
from mlcbuild.models.parsing import family_names, parse
from mlcbuild.quant.format import load_format
from mlcbuild.recipe import Bench, LocalSource, Model, Recipe, Variant, expand
from mlcbuild.targets.backends import Backend, backend

UNKNOWN_MEMORY = 4 << 30
"""Assumed upper bound in bytes for a step on a model whose config is not downloaded yet."""
PROCESS_MEMORY = 300 << 20
"""Bytes of memory of a process with NumPy, including a reserve."""


@dataclass(frozen=True)
class Checkpoint:
    """What is known about a model of the recipe before anything runs."""

    model: Model
    node: Node
    label: str
    """Shortened digest of the config, used in the names of steps."""
    config: ModelConfig | None
    """The config; None while it is not downloaded."""
    file: str | None = None
    """Name of the GGUF file in the directory of `node`; None for a checkpoint that is a directory."""
    most: int = UNKNOWN_MEMORY
    """Upper bound of the bytes of its float32 weights, for an unknown config."""

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def kind(self) -> CheckpointKind:
        return SAFETENSORS if self.file is None else GGUF

    @property
    def params(self) -> dict[str, Json]:
        """The parameters of every step that reads the checkpoint."""
        return {} if self.file is None else {"file": self.file}

    @property
    def families(self) -> tuple[str, ...]:
        """The families whose code its config step may run; all of them while config.json is not
        downloaded."""
        return family_names() if self.config is None else (self.config.family,)

    @cached_property
    def parameters(self) -> tuple[Param, ...]:
        """The parameters of the model, if its config is known."""
        return _parameters(self.config) if self.config is not None else ()

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest parameter in float32."""
        if self.config is None:
            return self.most // 4
        return 4 * max(math.prod(param.shape) for param in self.parameters)


def check(recipe: Recipe) -> None:
    """Raises InputError, as `build` does, for invalid variants of local models."""
    examined(recipe, expand(recipe), None)


def faults(models: Iterable[Model]) -> Iterator[Problem]:
    """Yields the problems of local models; `recipe.load` reports them with all others."""
    read = cache(_read_local)  # cached, since many models may share a directory
    for model in models:
        if isinstance(model.source, LocalSource):
            checkpoint = read(model.source.path)
            lines = checkpoint if isinstance(checkpoint, list) else []
            yield from (model.place.problem(f"model '{model.name}': {line}") for line in lines)


def examined(recipe: Recipe, variants: Iterable[Variant], lock: Lock | None) -> dict[str, Checkpoint]:
    """Returns model -> checkpoint for the variants; without a lock only local models. Raises InputError."""
    variants = list(variants)
    models = {variant.model.name: variant.model for variant in variants}
    problems = Problems(faults(models.values()))
    if problems:
        raise InputError(problems)
    read = cache(_read_local)
    checkpoints: dict[str, Checkpoint] = {}
    for name, model in models.items():
        if isinstance(model.source, LocalSource):
            checkpoints[name] = _local(model, model.source.path, read)
        elif lock is not None:
            checkpoints[name] = _pinned(model, model.source, lock)
    for variant in variants:
        problems += _unreadable(variant)
        if variant.model.name in checkpoints:
            problems += _misfits(variant, checkpoints[variant.model.name], recipe.bench)
    if problems:
        raise InputError(problems)
    return checkpoints


def _pinned(model: Model, source: HubSource, lock: Lock) -> Checkpoint:
    locked = lock.sources[source]
    step = Step(
        f"fetch/{model.name}",
        "mlcbuild.checkpoints.fetch:fetch",
        locked.params(source),
        {},
        memory=PROCESS_MEMORY,
    )
    stored = sum(file.size for path, file in locked.files.items() if path.endswith(".safetensors"))
    most = min(UNKNOWN_MEMORY, 4 * stored)
    return Checkpoint(model, step, locked.files["config.json"].sha256[:12], None, most=most)


@dataclass(frozen=True)
class _Local:
    """A local checkpoint whose config was read."""

    root: Path
    files: tuple[str, ...]
    """Names of the relevant files, relative to `root`."""
    config: ModelConfig
    digest: str
    """Digest of the config."""
    file: str | None = None
    """Name of the GGUF file, for a checkpoint that is one."""


def _local(model: Model, root: Path, read: Callable[[Path], _Local | list[str]]) -> Checkpoint:
    checkpoint = read(root)
    if isinstance(checkpoint, list):  # the files changed since the last check
        raise InputError(model.place.problem(f"model '{model.name}': {line}") for line in checkpoint)
    source = Source(f"fetch/{model.name}", checkpoint.root, checkpoint.files)
    return Checkpoint(model, source, checkpoint.digest[:12], checkpoint.config, checkpoint.file)


def _read_local(root: Path) -> _Local | list[str]:
    """Reads a local checkpoint; returns error messages for an invalid one."""
    try:
        if root.suffix == ".gguf":
            return _read_gguf(root)
        files = local_files(root)
        config = parse(read_json(root / "config.json"), str(root / "config.json"))
    except (SourceError, CheckpointError) as error:
        return str(error).split("\n")
    return _Local(root, files, config, config_digest(config))


def _read_gguf(path: Path) -> _Local:
    """Reads a GGUF file. Raises CheckpointError."""
    from mlcbuild.checkpoints.gguf_config import read_config  # loads NumPy
    from mlcbuild.checkpoints.gguf_file import parts

    config = read_config(path)
    files = tuple(part.name for part in parts(path))
    return _Local(path.parent, files, config, config_digest(config), files[0])


def _unreadable(variant: Variant) -> Iterator[Problem]:
    """Yields a problem if the device of a variant's target cannot read the formats of its scheme."""
    fault = _storage_fault(variant.scheme, backend(variant.target))
    if fault is not None:
        yield variant.model.place.problem(
            f"model '{variant.model.name}', quantization '{variant.quantization}', target "
            f"'{variant.target.name}': {fault}"
        )


def _misfits(variant: Variant, checkpoint: Checkpoint, bench: Bench | None) -> Iterator[Problem]:
    """Yields the requirements of a variant that a known model cannot meet."""
    if checkpoint.config is None:
        return
    place, config = variant.model.place, checkpoint.config
    window = context_window(config, variant.limits.context_window)
    if window > config.max_position:
        yield place.problem(
            f"model '{variant.model.name}' takes at most {config.max_position} tokens, but "
            f"compile.context_window is {window} for {variant.name}; lower it"
        )
    elif bench is not None and bench.prompt_tokens + bench.generate_tokens > window:
        yield bench.place.problem(
            f"{bench.prompt_tokens} tokens of prompt and {bench.generate_tokens} of answer do not fit the "
            f"context of {variant.name}, {window}; lower them, or raise compile.context_window"
        )
    fault = _block_fault(backend(variant.target), checkpoint.config)
    if fault is not None:
        yield place.problem(f"model '{variant.model.name}', target '{variant.target.name}': {fault}")
    for sentence in _override_faults(variant.scheme, checkpoint.config):
        yield place.problem(
            f"model '{variant.model.name}', quantization '{variant.quantization}': {sentence}"
        )


# Thousands of variants may share few configs and schemes.
_parameters = lru_cache(maxsize=256)(parameters)


@lru_cache(maxsize=1024)
def _override_faults(scheme: quant.Scheme, config: ModelConfig) -> tuple[str, ...]:
    return quant.check_overrides(scheme, _parameters(config))


@lru_cache(maxsize=1024)
def _block_fault(device: Backend, config: ModelConfig) -> str | None:
    try:
        device.check(config)
    except UsageError as error:
        return str(error)
    return None


@lru_cache(maxsize=1024)
def _storage_fault(scheme: quant.Scheme, device: Backend) -> str | None:
    try:
        for _, own in (("", scheme), *scheme.overrides):
            load_format(own.format, device.layout(own))
    except UsageError as error:
        return str(error)
    return None


@lru_cache(maxsize=1024)
def stored_bytes(scheme: quant.Storage, config: ModelConfig) -> int:
    return quant.stored_bytes(_parameters(config), scheme)
