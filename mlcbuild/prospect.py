"""Examines the checkpoints of a recipe before any step runs, and checks that its variants fit them.

For a local checkpoint the config is read, and the size of each weights file is compared with its header. For
a checkpoint on a hub only the list of files in the lock file is available.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from mlcbuild import quant
from mlcbuild.build.graph import Node, Source, Step
from mlcbuild.canon import Json
from mlcbuild.checkpoints.adapter_config import read_adapter_config
from mlcbuild.checkpoints.checkpoint_kinds import (
    GGUF,
    LORA,
    SAFETENSORS,
    CheckpointKind,
    adapter_argument,
    kind_of_files,
    tokenizer_fault,
)
from mlcbuild.checkpoints.completeness import weights_faults
from mlcbuild.checkpoints.fetch import local_files
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.checkpoints.quantization import method_of, methods, module_of
from mlcbuild.errors import CheckpointError, InputError, Problem, Problems, SourceError
from mlcbuild.models import ModelConfig, Param, config_digest, context_window, int8_cache_fault
from mlcbuild.models.action import quantization, read_json
from mlcbuild.models.parsing import family_names, parse, tensor_names
from mlcbuild.quant.as_is import UNQUANTIZED, is_as_is, resolved, undecided
from mlcbuild.recipe import Bench, LocalSource, Recipe, RecipeModel, Variant, expand
from mlcbuild.scheme_fit import block_fault, listed_parameters, scheme_faults, storage_fault
from mlcbuild.targets.backends import backend

_FETCH = "mlcbuild.checkpoints.fetch:fetch"
_ADAPTED = (
    "'as-is' keeps the values of quantized tensors, and adapters change them; choose a scheme such as q4a8_1"
)
UNKNOWN_MEMORY = 4 << 30
"""Largest number of bytes assumed for the float32 weights of a model on a hub, whose config is not read
before the run. The memory of its steps is estimated from it."""
_GROWTH = 16
"""Assumed maximum ratio of a model's size in float32 to that of its GGUF file: 16, as if all tensors had 2
bits per weight."""
PROCESS_MEMORY = 300 << 20
"""Bytes of memory that a step's Python process with NumPy takes, including a reserve."""


@dataclass(frozen=True)
class Checkpoint:
    """The properties of a recipe's model that can be read before any step runs, such as its config. A
    checkpoint on a hub is not opened, even if an earlier run downloaded it."""

    model: RecipeModel
    node: Node
    label: str
    """First 12 hexadecimal digits of the BLAKE3 digest of a local model's config, or of the SHA-256 of the
    config.json or GGUF file of a model on a hub; part of the names of steps."""
    config: ModelConfig | None
    """The config of a local model; None for a model on a hub."""
    kind: CheckpointKind = SAFETENSORS
    file: str | None = None
    """Path of a checkpoint's GGUF file (the first if it has several), relative to the directory of the graph
    node that provides it; None for a checkpoint that is a directory."""
    most: int = UNKNOWN_MEMORY
    """Upper bound, in bytes, of the checkpoint's weights in float32, used while the config is unknown."""
    root: Path | None = None
    """The path of the GGUF file (the first of several) or of the checkpoint's directory; None for a
    checkpoint on a hub."""
    settings: str = ""
    """The local checkpoint's quantization_config as JSON; "" for unquantized weights, GGUF files and
    checkpoints on a hub."""
    adapters: tuple[Node, ...] = ()
    """The graph nodes that provide the directories of the LoRA adapters merged into the checkpoint, in the
    recipe's order."""

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def params(self) -> dict[str, Json]:
        """Returns name -> value of the parameters that every step has which reads this checkpoint: {"file":
        path} for a GGUF file, {} for a directory."""
        return {} if self.file is None else {"file": self.file}

    @property
    def weights_params(self) -> dict[str, Json]:
        """Returns name -> value of the parameters that every step has which reads this checkpoint's weights:
        "file", the path of a GGUF file, and "adapters", the list of the LoRA adapters' factors as texts. A
        name is left out if there is no such file or adapter."""
        factors: list[Json] = [repr(adapter.weight) for adapter in self.model.adapters]
        return {**self.params, **({"adapters": factors} if factors else {})}

    @property
    def code(self) -> tuple[str, ...]:
        """Returns the dotted names of the Python modules that steps load by name when they read this
        checkpoint's weights; all readers of quantized weights for a checkpoint on a hub, except a GGUF file.
        """
        readers: tuple[str, ...] = ()
        if self.config is None and self.file is None:
            readers = methods()  # config.json may name any of these methods.
        elif self.settings:
            readers = (method_of(json.loads(self.settings), self.name),)
        return (*self.kind.code, *map(module_of, readers), *((LORA,) if self.adapters else ()))

    @property
    def families(self) -> tuple[str, ...]:
        """Returns the names of the model families, such as "llama", whose code may run in the step
        `config/<model>`: all families for a model on a hub, whose config is not read before the run."""
        return family_names() if self.config is None else (self.config.family,)

    @cached_property
    def parameters(self) -> tuple[Param, ...]:
        """Returns the parameters (weights) of a local model; () for a model on a hub."""
        return listed_parameters(self.config) if self.config is not None else ()

    @cached_property
    def largest(self) -> int:
        """Returns the size in bytes of the model's largest matrix with float32 elements. Each expert's matrix
        counts alone, since build steps read experts one at a time. For a model on a hub, returns a quarter of
        the upper bound that is assumed for all weights."""
        if self.config is None:
            return self.most // 4
        return 4 * max(math.prod(param.matrix or param.shape) for param in self.parameters)


def check(recipe: Recipe) -> None:
    """Checks the local models of a recipe: that each can be read, and that its config allows the scheme, the
    target and the context window of the recipe's variants. Raises InputError with all problems of the models
    or, if they have none, of the variants."""
    examined(recipe, expand(recipe), None)


def faults(models: Iterable[RecipeModel]) -> Iterator[Problem]:
    """Yields the problems of a recipe's local models and local LoRA adapters: invalid configs, damaged or
    missing files, wrong adapters. `recipe.load` reports them together with all others."""
    read = cache(_read_local)  # cached, since many models may share a directory
    for model in models:
        yield from _adapter_faults(model)
        if isinstance(model.source, LocalSource):
            checkpoint = read(model.source.path)
            lines = checkpoint if isinstance(checkpoint, list) else []
            yield from (model.place.problem(f"model '{model.name}': {line}") for line in lines)


def _adapter_faults(model: RecipeModel) -> Iterator[Problem]:
    """Yields the problems of the local LoRA adapters of a recipe's model."""
    for adapter in model.adapters:
        if isinstance(adapter.source, LocalSource):
            try:
                files = local_files(adapter.source.path, is_adapter=True)
                read_adapter_config(adapter.source.path)
                lines = weights_faults(adapter.source.path, files)
            except (SourceError, CheckpointError) as error:
                lines = str(error).split("\n")
            yield from (adapter.place.problem(line) for line in lines)


def examined(recipe: Recipe, variants: Iterable[Variant], lock: Lock | None) -> dict[str, Checkpoint]:
    """Reads the checkpoints of the variants' models, checks that the variants fit them, and returns model
    name -> its checkpoint. lock: the pinned files of models on a hub; if it is None, only local models are
    examined. Raises InputError with all problems of the local models; if none, with the first of a model on a
    hub; then with all of variants with `as-is`; then with all others."""
    variants = list(variants)
    models = {variant.model.name: variant.model for variant in variants}
    problems = Problems(faults(models.values()))
    if problems:
        raise InputError(problems)
    checkpoints = _checkpoints(models, lock)
    for variant in with_formats(variants, checkpoints):
        problems += _unreadable(variant)
        if variant.model.name in checkpoints:
            problems += _misfits(variant, checkpoints[variant.model.name], recipe.bench)
    if problems:
        raise InputError(problems)
    return checkpoints


def _checkpoints(models: Mapping[str, RecipeModel], lock: Lock | None) -> dict[str, Checkpoint]:
    read = cache(_read_local)
    checkpoints: dict[str, Checkpoint] = {}
    for name, model in models.items():
        adapters = tuple(_adapter_nodes(model, lock))
        if isinstance(model.source, LocalSource):
            checkpoint = _local(model, model.source.path, read)
        elif lock is not None:
            checkpoint = _pinned(model, model.source, lock)
        else:
            continue
        checkpoints[name] = replace(checkpoint, adapters=adapters) if adapters else checkpoint
    return checkpoints


def _adapter_nodes(model: RecipeModel, lock: Lock | None) -> Iterator[Node]:
    """Yields the graph nodes that provide a model's LoRA adapters. lock: the pinned files of adapters on a
    hub; if it is None, only those of local adapters are yielded. Raises InputError for a repository without
    adapter."""
    for i, adapter in enumerate(model.adapters):
        name = f"fetch/{model.name}/{adapter_argument(i)}"
        if isinstance(adapter.source, LocalSource):
            files = local_files(adapter.source.path, is_adapter=True)
            yield Source(name, adapter.source.path, files)
        elif lock is not None:
            locked = lock.sources[adapter.source]
            if "adapter_config.json" not in locked.files:
                raise InputError([adapter.place.problem(f"{adapter.source} holds no LoRA adapter of PEFT")])
            yield Step(name, _FETCH, locked.params(adapter.source), {}, memory=PROCESS_MEMORY)


def with_formats(variants: Iterable[Variant], checkpoints: Mapping[str, Checkpoint]) -> tuple[Variant, ...]:
    """Returns the variants, with each scheme `as-is`, which keeps a checkpoint's quantized values, replaced
    by formats that hold them or, for a checkpoint on a hub, by all formats among which a later step chooses.
    A variant with `as-is` is left out if its model is not in `checkpoints`.

    checkpoints: name of a model -> its checkpoint. Raises InputError if a local checkpoint is not quantized
    or cannot be read, or if adapters would change its values.
    """
    complete, problems = [], Problems()
    resolve = cache(_resolved)
    for variant in variants:
        if not is_as_is(variant.scheme):
            complete.append(variant)
        elif (checkpoint := checkpoints.get(variant.model.name)) is not None:
            scheme: quant.Scheme | str = _ADAPTED
            if not variant.model.adapters:
                scheme = resolve(variant.scheme, checkpoint.root, checkpoint.config, checkpoint.settings)
            if isinstance(scheme, str):
                place = f"model '{variant.model.name}', quantization '{variant.quantization}'"
                problems += [variant.model.place.problem(f"{place}: {line}") for line in scheme.split("\n")]
            else:
                complete.append(replace(variant, scheme=scheme))
    if problems:
        raise InputError(problems)
    return tuple(complete)


def _resolved(
    scheme: quant.Scheme, root: Path | None, config: ModelConfig | None, settings: str
) -> quant.Scheme | str:
    """Returns a copy of `scheme` with the formats of a quantized checkpoint in place of `as-is`, or an error
    message. root: the checkpoint's path, None for one on a hub: all formats are then candidates; settings:
    its quantization_config as JSON, "" without one."""
    from mlcbuild.checkpoints.checkpoint_views import views_for  # loads NumPy
    from mlcbuild.checkpoints.gguf_names import names_in_file
    from mlcbuild.checkpoints.mapping import locate

    if root is None or config is None:
        return undecided(scheme)
    if not (settings or root.suffix == ".gguf"):
        return UNQUANTIZED
    try:
        names = names_in_file(root, config) if root.suffix == ".gguf" else tensor_names(config)
        sources = locate(root, config, names, views_for(json.loads(settings) if settings else None))
    except CheckpointError as error:
        return str(error)
    return resolved(
        scheme, {source.param.name: source.kinds for source in sources}, listed_parameters(config)
    )


def _pinned(model: RecipeModel, source: HubSource, lock: Lock) -> Checkpoint:
    locked = lock.sources[source]
    if not source.file and "config.json" not in locked.files:
        line = f"{source} holds an adapter and no model; list it under 'adapters' of a model"
        raise InputError([model.place.problem(f"model '{model.name}': {line}")])
    fault = None if source.file else tokenizer_fault(str(source), locked.files)
    if fault is not None:
        raise InputError([model.place.problem(f"model '{model.name}': {fault}")])
    step = Step(
        f"fetch/{model.name}",
        _FETCH,
        locked.params(source),
        {},
        memory=PROCESS_MEMORY,
    )
    endings = (".safetensors", ".bin", ".gguf")
    stored = sum(file.size for path, file in locked.files.items() if path.endswith(endings))
    most = min(UNKNOWN_MEMORY, _GROWTH * stored if source.file else 4 * stored)
    kind = GGUF if source.file else kind_of_files(locked.files)
    label = locked.files[source.file or "config.json"].sha256[:12]
    return Checkpoint(model, step, label, None, kind, source.file or None, most=most)


@dataclass(frozen=True)
class _Local:
    """The properties of a checkpoint on this machine that are read before any step runs: its config, the
    names of its files and how its weights are stored."""

    root: Path
    files: tuple[str, ...]
    """Paths of the files that build steps read from a local checkpoint, relative to its directory."""
    config: ModelConfig
    digest: str
    """BLAKE3 digest, in hexadecimal, of the ModelConfig that config.json or the header of the GGUF file
    describes."""
    file: str | None = None
    """Name of the GGUF file, the first if the checkpoint has several; None for a checkpoint in safetensors or
    PyTorch files."""
    settings: str = ""
    """The local checkpoint's quantization_config as JSON; "" for unquantized weights and GGUF files."""


def _local(model: RecipeModel, root: Path, read: Callable[[Path], _Local | list[str]]) -> Checkpoint:
    checkpoint = read(root)
    if isinstance(checkpoint, list):  # the files changed since the last check
        raise InputError(model.place.problem(f"model '{model.name}': {line}") for line in checkpoint)
    source = Source(f"fetch/{model.name}", checkpoint.root, checkpoint.files)
    path = checkpoint.root / (checkpoint.file or "")
    kind = kind_of_files(checkpoint.files) if checkpoint.file is None else GGUF
    label, settings = checkpoint.digest[:12], checkpoint.settings
    return Checkpoint(
        model, source, label, checkpoint.config, kind, checkpoint.file, root=path, settings=settings
    )


def _read_local(root: Path) -> _Local | list[str]:
    """Reads the config and the file list of the local checkpoint at `root`, a directory or a GGUF file, and
    returns them; a list of error messages instead if it is invalid."""
    try:
        if root.suffix == ".gguf":
            return _read_gguf(root)
        files = local_files(root)
        values = read_json(root / "config.json")
        config = parse(values, str(root / "config.json"))
        settings = quantization(values)
        if settings is not None:
            method_of(settings, str(root / "config.json"))
    except (SourceError, CheckpointError) as error:
        return str(error).split("\n")
    faults = weights_faults(root, files)
    if (fault := tokenizer_fault(str(root), files)) is not None:
        faults.append(fault)
    if faults:
        return faults
    stored = "" if settings is None else json.dumps(settings, sort_keys=True)
    return _Local(root, files, config, config_digest(config), settings=stored)


def _read_gguf(path: Path) -> _Local:
    """Reads the header of a GGUF file and returns it as a local checkpoint. Raises CheckpointError if the
    file is damaged or another file of the same model is missing."""
    from mlcbuild.checkpoints.gguf_config import read_config  # loads NumPy
    from mlcbuild.checkpoints.gguf_file import parts

    config = read_config(path)
    files = tuple(part.name for part in parts(path))
    return _Local(path.parent, files, config, config_digest(config), files[0])


def _unreadable(variant: Variant) -> Iterator[Problem]:
    """Yields a problem if the device of a variant's target cannot read the formats of its scheme, and another
    if it cannot read the variant's int8 KV cache."""
    if variant.kv_cache == "int8" and not backend(variant.target).int8_cache:
        yield variant.model.place.problem(
            f"target '{variant.target.name}': compile.kv_cache is int8, which only CPUs have: leave it out "
            "for this target, or use a CPU"
        )
    fault = storage_fault(variant.scheme, backend(variant.target))
    if fault is not None:
        yield variant.model.place.problem(
            f"model '{variant.model.name}', quantization '{variant.quantization}', target "
            f"'{variant.target.name}': {fault}"
        )


def _misfits(variant: Variant, checkpoint: Checkpoint, bench: Bench | None) -> Iterator[Problem]:
    """Yields a problem for each requirement of a variant that its model does not meet, such as its context
    window; nothing while the model's config is unknown."""
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
    if variant.kv_cache == "int8" and (fault := int8_cache_fault(config)):
        yield place.problem(f"model '{variant.model.name}': {fault}")
    fault = block_fault(backend(variant.target), checkpoint.config)
    if fault is not None:
        yield place.problem(f"model '{variant.model.name}', target '{variant.target.name}': {fault}")
    for sentence in scheme_faults(variant.scheme, backend(variant.target), checkpoint.config):
        yield place.problem(
            f"model '{variant.model.name}', quantization '{variant.quantization}': {sentence}"
        )
