"""The meaning of a recipe: its variants as steps. The only module that knows both steps and models.

fetch/<model>                              the checkpoint: a directory of the user, or a download
config/<model>                             config.json, normalised
tokenizer/<model>                          tokenizer, template, serving defaults
reference/<model>                          logits of the prompts, in NumPy
weights/<model>/<scheme>/<layout>          packed weights
library/<config>/<scheme>/<target>         compiled code; no weights and no model's name enter it
bundle/<variant>                           all of it together
verify/<variant>                           the bundle against the reference
bench/<variant>                            the speed of the bundle on this kind of machine
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path

from mlcbuild import bundle, machine, quant, targets
from mlcbuild.canon import Json, digest
from mlcbuild.errors import CheckpointError, InputError, Problem, SetupError, SourceError
from mlcbuild.fetch import local_files
from mlcbuild.graph import Graph, Input, Node, Source, Step
from mlcbuild.hub import HubSource
from mlcbuild.lock import Lock
from mlcbuild.models import ModelConfig, Param, config_digest, context_window, parameters, parse
from mlcbuild.models.action import read_json
from mlcbuild.recipe import Bench, LocalSource, Model, Recipe, Variant, Verify, expand
from mlcbuild.verify import PROMPTS, THRESHOLDS

TENSORS = ("*.safetensors", "*.safetensors.index.json")
"""Files of a checkpoint that hold its weights."""
MANY_CORES = 64
"""For steps that use whatever the machine gives."""
UNKNOWN_MEMORY = 4 << 30
"""Bytes assumed for a step on a model whose config is not known before it is fetched, at most."""
COMPILER_MEMORY = 600 << 20
"""Bytes of a compiling process: 0.27 GB were measured for 30 layers, whatever the scheme."""
PROCESS_MEMORY = 300 << 20
"""Bytes of a process that has NumPy loaded, with room."""


@dataclass(frozen=True)
class Product:
    """What a variant becomes."""

    variant: Variant
    steps: tuple[str, ...]
    """Every step of its own or shared, without the source."""
    library: str
    bundle: str
    verify: str | None
    unverified: str = ""
    """Why there is no verification, in words."""
    bench: str | None = None
    """Measures it; no part of what makes the bundle."""

    @property
    def last(self) -> str:
        return self.verify or self.bundle

    @property
    def ends(self) -> tuple[str, ...]:
        """Steps of it that no other step needs."""
        return (self.last,) if self.bench is None else (self.last, self.bench)


@dataclass(frozen=True)
class Pipeline:
    recipe: Recipe
    graph: Graph
    products: tuple[Product, ...]
    configs: Mapping[str, ModelConfig]
    """By model, of those whose config.json is here already."""

    def choose(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Steps that names or globs of variants and steps mean. Raises UsageError."""
        chosen: list[str] = []
        for pattern in patterns:
            found = [item for item in self.products if fnmatchcase(item.variant.name, pattern)]
            chosen += [end for item in found for end in item.ends] or sorted(self.graph.match([pattern]))
        return tuple(dict.fromkeys(chosen))


@dataclass(frozen=True)
class _Checkpoint:
    """One model of the recipe, as far as it is known before anything runs."""

    model: Model
    node: Node
    label: str
    """What stands for the config in names: a digest, shortened."""
    config: ModelConfig | None
    """None: it is not here yet."""
    most: int = UNKNOWN_MEMORY
    """Bytes that its weights have in float32, at most, when the config is not known."""

    @property
    def name(self) -> str:
        return self.model.name

    @cached_property
    def parameters(self) -> tuple[Param, ...]:
        """Of the config, where it is known."""
        return parameters(self.config) if self.config is not None else ()

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest parameter in float32."""
        if self.config is None:
            return self.most // 4
        return 4 * max(math.prod(param.shape) for param in self.parameters)


def build(recipe: Recipe, lock: Lock) -> Pipeline:
    """The steps of every variant. Reads config.json of local models, and nothing else of checkpoints.

    Raises InputError for models that cannot be built, naming their places in the recipe.
    """
    variants = expand(recipe)
    problems: list[Problem] = []
    found = {variant.model.name: variant.model for variant in variants}
    checkpoints = {name: _checkpoint(model, lock, problems) for name, model in found.items()}
    if not problems:
        problems += [
            problem for variant in variants for problem in _misfits(variant, checkpoints, recipe.bench)
        ]
    if problems:
        raise InputError(problems)
    assembly = _Assembly(
        recipe.directory,
        {name: item for name, item in checkpoints.items() if item is not None},
        recipe.bench,
    )
    products = tuple(assembly.add(variant) for variant in variants)
    configs = {name: item.config for name, item in assembly.checkpoints.items() if item.config is not None}
    return Pipeline(recipe, Graph(assembly.nodes.values()), products, configs)


def hub_sources(recipe: Recipe) -> tuple[HubSource, ...]:
    """What a lock must pin."""
    sources = (model.source for model in recipe.models.values())
    return tuple(source for source in sources if isinstance(source, HubSource))


def _checkpoint(model: Model, lock: Lock, problems: list[Problem]) -> _Checkpoint | None:
    name = f"fetch/{model.name}"
    if not isinstance(model.source, LocalSource):
        locked = lock.sources[model.source]
        params = locked.params(model.source)
        step = Step(name, "mlcbuild.fetch:fetch", params, {}, memory=PROCESS_MEMORY)
        stored = sum(file.size for path, file in locked.files.items() if path.endswith(".safetensors"))
        most = min(UNKNOWN_MEMORY, 4 * stored)
        return _Checkpoint(model, step, locked.files["config.json"].sha256[:12], None, most)
    root = model.source.path
    try:
        files = local_files(root)
        config = parse(read_json(root / "config.json"), str(root / "config.json"))
    except (SourceError, CheckpointError) as error:
        problems += [model.place.problem(f"model '{model.name}': {line}") for line in str(error).splitlines()]
        return None
    return _Checkpoint(model, Source(name, root, files), config_digest(config)[:12], config)


def _misfits(
    variant: Variant, checkpoints: Mapping[str, _Checkpoint | None], bench: Bench | None
) -> Iterator[Problem]:
    """What a variant asks of a known model that the model cannot give."""
    checkpoint = checkpoints[variant.model.name]
    if checkpoint is None or checkpoint.config is None:
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
    for sentence in quant.check_overrides(variant.scheme, checkpoint.parameters):
        yield place.problem(
            f"model '{variant.model.name}', quantization '{variant.quantization}': {sentence}"
        )


@dataclass
class _Assembly:
    """Collects nodes by name, each once."""

    directory: Path
    """The recipe's."""
    checkpoints: Mapping[str, _Checkpoint]
    bench: Bench | None
    nodes: dict[str, Node] = field(default_factory=dict)
    configs: dict[str, str] = field(default_factory=dict)
    """Label of a config -> the step that first made it."""
    tools: dict[targets.Target, Mapping[str, str]] = field(default_factory=dict)

    def add(self, variant: Variant) -> Product:
        checkpoint = self.checkpoints[variant.model.name]
        source = self._keep(checkpoint.node)
        config = self._keep(
            Step(
                f"config/{checkpoint.name}",
                "mlcbuild.models.action:normalise",
                {},
                {"checkpoint": Input(source, ("config.json",))},
            )
        )
        tokenizer = self._keep(
            Step(
                f"tokenizer/{checkpoint.name}",
                "mlcbuild.bundle:tokenizer",
                {},
                {"checkpoint": Input(source, (*bundle.TOKENIZER_FILES, bundle.POOLING, "config.json"))},
            )
        )
        weights = self._keep(_weights(variant, checkpoint, config))
        library = self._library(variant, checkpoint, config)
        made = self._bundle(variant, {"library": library, "weights": weights, "tokenizer": tokenizer})
        steps = (config, tokenizer, weights, library, made)
        why_not = targets.why_not(variant.target, targets.resolve(targets.HOST))
        if why_not is not None:
            return Product(variant, steps, library, made, None, why_not)
        reference = self._reference(variant, checkpoint, config, tokenizer)
        verify = self._keep(_verify(variant, checkpoint, made, reference))
        bench = None if self.bench is None else self._keep(_bench(variant, self.bench, made))
        return Product(variant, (*steps, reference, verify), library, made, verify, bench=bench)

    def _keep(self, node: Node) -> str:
        self.nodes.setdefault(node.name, node)
        return node.name

    def _keep_apart(self, step: Step) -> str:
        """As _keep; a step that differs from the one which has its name gets a longer name.

        The plain name stays with what is usual, so that a change is told as a change and not as new.
        """
        if self.nodes.get(step.name, step) == step:
            return self._keep(step)
        inputs = {argument: [item.node, *item.select] for argument, item in step.inputs.items()}
        return self._keep(replace(step, name=f"{step.name}/{digest('step/1', [step.params, inputs])[:8]}"))

    def _library(self, variant: Variant, checkpoint: _Checkpoint, config: str) -> str:
        limits: dict[str, Json] = dict(vars(variant.limits))
        return self._keep_apart(
            Step(
                f"library/{checkpoint.label}/{variant.quantization}/{variant.target.name}",
                "mlcbuild.compiler:compile_library",
                {
                    "scheme": quant.to_json(variant.scheme),
                    "target": targets.to_json(variant.target),
                    "limits": limits,
                },
                # Models that are alike share the node too, so that one library is one step.
                {"config": Input(self.configs.setdefault(checkpoint.label, config))},
                tools=self._tools(variant.target),
                labels=_labels(variant),
                memory=COMPILER_MEMORY,
            )
        )

    def _tools(self, target: targets.Target) -> Mapping[str, str]:
        """Asks programs for their versions, so once for each target."""
        from mlcbuild.compiler.versions import tools

        if target not in self.tools:
            try:
                self.tools[target] = tools(target)
            except SetupError:
                # Told by the step itself, if it comes to run: what else the recipe declares can be built.
                self.tools[target] = {"linker": "none"}
        return self.tools[target]

    def _bundle(self, variant: Variant, steps: Mapping[str, str]) -> str:
        inputs = {argument: Input(step) for argument, step in steps.items()}
        runtime = _runtime_library(variant.target)
        if runtime is not None:
            inputs["runtime"] = Input(self._keep(runtime))
        return self._keep(
            Step(
                f"bundle/{variant.name}",
                "mlcbuild.bundle:assemble",
                {
                    "name": variant.name,
                    "model": variant.model.name,
                    "scheme": quant.to_json(variant.scheme),
                    "target": {**targets.to_json(variant.target), "name": variant.target.name},
                },
                inputs,
                labels=_labels(variant),
            )
        )

    def _reference(self, variant: Variant, checkpoint: _Checkpoint, config: str, tokenizer: str) -> str:
        inputs = {
            "config": Input(config),
            "tokenizer": Input(tokenizer),
            "checkpoint": Input(checkpoint.node.name, TENSORS),
        }
        wanted = variant.verify.prompts if variant.verify is not None else PROMPTS
        if isinstance(wanted, Path):
            name = f"prompts/{Path(os.path.relpath(wanted, self.directory)).as_posix()}"
            inputs["prompts"] = Input(self._keep(Source(name, wanted.parent, (wanted.name,))))
        return self._keep_apart(
            Step(
                f"reference/{checkpoint.name}",
                "mlcbuild.verify:reference",
                {
                    "prompts": wanted.name if isinstance(wanted, Path) else list(wanted),
                    "context_window": variant.limits.context_window,
                },
                inputs,
                cores=MANY_CORES,
                memory=checkpoint.largest * 3 + (1 << 30),
            )
        )


def _weights(variant: Variant, checkpoint: _Checkpoint, config: str) -> Step:
    return Step(
        f"weights/{checkpoint.name}/{variant.quantization}/{variant.scheme.layout}",
        "mlcbuild.weights:convert",
        {"scheme": quant.to_json(variant.scheme)},
        {"config": Input(config), "checkpoint": Input(checkpoint.node.name, TENSORS)},
        labels=_labels(variant),
        cores=MANY_CORES,
        memory=checkpoint.largest * 3 + PROCESS_MEMORY,
    )


def _verify(variant: Variant, checkpoint: _Checkpoint, made: str, reference: str) -> Step:
    limits = variant.verify or Verify(())
    known = checkpoint.config is not None
    size = quant.stored_bytes(checkpoint.parameters, variant.scheme) if known else checkpoint.most
    return Step(
        f"verify/{variant.name}",
        "mlcbuild.verify:verify",
        {name: None if (value := getattr(limits, name)) is None else repr(value) for name in THRESHOLDS},
        {"bundle": Input(made), "reference": Input(reference)},
        cores=MANY_CORES,
        memory=size + PROCESS_MEMORY,
        needs=targets.labels(variant.target),
    )


def _bench(variant: Variant, bench: Bench, made: str) -> Step:
    """Its result says something about machines of one kind only, so that kind is part of the key."""
    here = machine.kind()
    return Step(
        f"bench/{variant.name}",
        "mlcbuild.bench.speed:bench",
        {
            "prompt_tokens": bench.prompt_tokens,
            "generate_tokens": bench.generate_tokens,
            "machine": here,
        },
        {"bundle": Input(made)},
        cores=MANY_CORES,
        needs=(*targets.labels(variant.target), machine.label(here)),
        shared=False,
        alone=True,
    )


def _labels(variant: Variant) -> dict[str, str]:
    return {"scheme": f"scheme {variant.quantization}", "target": f"target {variant.target.name}"}


@cache
def _runtime_library(target: targets.Target) -> Source | None:
    """TVM's runtime for the bundle, where this machine's is the target's."""
    host = targets.resolve(targets.HOST)
    found = bundle.tvm_runtime()
    same = (target.system, target.architecture) == (host.system, host.architecture)
    if found is None or not same or target.output != "shared":
        return None
    return Source("tvm-runtime", found.parent, (found.name,))
