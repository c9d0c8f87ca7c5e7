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

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path

from mlcbuild import machine, quant
from mlcbuild.build.graph import Graph, Input, Node, Source, Step
from mlcbuild.bundles import assemble as bundle
from mlcbuild.bundles.reference_logits import PROMPTS
from mlcbuild.bundles.verify import THRESHOLDS
from mlcbuild.canon import Json, digest
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import SetupError
from mlcbuild.models import ModelConfig
from mlcbuild.models.parsing import family_module
from mlcbuild.prospect import PROCESS_MEMORY, Checkpoint, examined, stored_bytes
from mlcbuild.quant.format import format_module
from mlcbuild.recipe import Bench, Recipe, Variant, Verify, expand
from mlcbuild.targets import target as targets
from mlcbuild.targets.backends import backend

MANY_CORES = 64
"""For steps that use whatever the machine gives."""
COMPILER_MEMORY = 600 << 20
"""Bytes of a compiling process: 0.27 GB were measured for 30 layers, whatever the scheme."""


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


def build(recipe: Recipe, lock: Lock) -> Pipeline:
    """The steps of every variant. Reads config.json of local models, and nothing else of checkpoints.

    Raises InputError for models that cannot be built, naming their places in the recipe.
    """
    variants = expand(recipe)
    checkpoints = examined(recipe, variants, lock)
    assembly = _Assembly(recipe.directory, checkpoints, recipe.bench)
    products = tuple(assembly.add(variant) for variant in variants)
    configs = {name: item.config for name, item in checkpoints.items() if item.config is not None}
    return Pipeline(recipe, Graph(assembly.nodes.values()), products, configs)


def hub_sources(recipe: Recipe) -> tuple[HubSource, ...]:
    """What a lock must pin."""
    sources = (model.source for model in recipe.models.values())
    return tuple(source for source in sources if isinstance(source, HubSource))


@dataclass
class _Assembly:
    """Collects nodes by name, each once."""

    directory: Path
    """The recipe's."""
    checkpoints: Mapping[str, Checkpoint]
    bench: Bench | None
    nodes: dict[str, Node] = field(default_factory=dict)
    configs: dict[str, str] = field(default_factory=dict)
    """Label of a config -> the step that first made it."""
    tools: dict[targets.Target, Mapping[str, str]] = field(default_factory=dict)

    def add(self, variant: Variant) -> Product:
        checkpoint = self.checkpoints[variant.model.name]
        kind = checkpoint.kind
        source = self._keep(checkpoint.node)
        config = self._keep(
            Step(
                f"config/{checkpoint.name}",
                kind.config,
                checkpoint.params,
                {"checkpoint": Input(source, kind.config_files)},
                code=tuple(map(family_module, checkpoint.families)),
            )
        )
        tokenizer = self._keep(
            Step(
                f"tokenizer/{checkpoint.name}",
                kind.tokenizer,
                checkpoint.params,
                {"checkpoint": Input(source, kind.tokenizer_files)},
            )
        )
        weights = self._keep_apart(_weights(variant, checkpoint, config))
        library = self._library(variant, checkpoint, config)
        made = self._bundle(variant, {"library": library, "weights": weights, "tokenizer": tokenizer})
        steps = (config, tokenizer, weights, library, made)
        why_not = backend(variant.target).can_run(variant.target, targets.resolve(targets.HOST))
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

    def _library(self, variant: Variant, checkpoint: Checkpoint, config: str) -> str:
        limits: dict[str, Json] = dict(vars(variant.limits))
        scheme = _storage(variant)
        return self._keep_apart(
            Step(
                f"library/{checkpoint.label}/{variant.quantization}/{variant.target.name}",
                backend(variant.target).action,
                {
                    "scheme": quant.to_json(scheme),
                    "target": targets.to_json(variant.target),
                    "limits": limits,
                },
                # Models that are alike share the node too, so that one library is one step.
                {"config": Input(self.configs.setdefault(checkpoint.label, config), ("config.json",))},
                tools=self._tools(variant.target),
                code=tuple(map(format_module, scheme.formats)),
                labels=_labels(variant),
                memory=COMPILER_MEMORY,
            )
        )

    def _tools(self, target: targets.Target) -> Mapping[str, str]:
        """Asks programs for their versions, so once for each target."""
        if target not in self.tools:
            try:
                self.tools[target] = backend(target).tool_versions(target)
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
                "mlcbuild.bundles.assemble:assemble",
                {
                    "name": variant.name,
                    "model": variant.model.name,
                    "scheme": quant.describe(_storage(variant)),
                    "target": {**targets.to_json(variant.target), "name": variant.target.name},
                },
                inputs,
                labels=_labels(variant),
            )
        )

    def _reference(self, variant: Variant, checkpoint: Checkpoint, config: str, tokenizer: str) -> str:
        inputs = {
            "config": Input(config),
            "tokenizer": Input(tokenizer),
            "checkpoint": Input(checkpoint.node.name, checkpoint.kind.weights_files),
        }
        wanted = variant.verify.prompts if variant.verify is not None else PROMPTS
        if isinstance(wanted, Path):
            name = f"prompts/{Path(os.path.relpath(wanted, self.directory)).as_posix()}"
            inputs["prompts"] = Input(self._keep(Source(name, wanted.parent, (wanted.name,))))
        return self._keep_apart(
            Step(
                f"reference/{checkpoint.name}",
                "mlcbuild.bundles.reference_logits:reference",
                {
                    "prompts": wanted.name if isinstance(wanted, Path) else list(wanted),
                    "context_window": variant.limits.context_window,
                    **checkpoint.params,
                },
                inputs,
                code=checkpoint.kind.code,
                cores=MANY_CORES,
                memory=checkpoint.largest * 3 + (1 << 30),
            )
        )


def _storage(variant: Variant) -> quant.Storage:
    """Returns the variant's scheme as the device of its target stores it."""
    return _stored_on(variant.target, variant.scheme)


@lru_cache(maxsize=4096)
def _stored_on(target: targets.Target, scheme: quant.Scheme) -> quant.Storage:
    """Thousands of variants share few targets and schemes."""
    return backend(target).storage(scheme)


def _weights(variant: Variant, checkpoint: Checkpoint, config: str) -> Step:
    scheme = _storage(variant)
    return Step(
        f"weights/{checkpoint.name}/{variant.quantization}/{scheme.layout}",
        "mlcbuild.checkpoints.conversion:convert",
        {"scheme": quant.to_json(scheme), **checkpoint.params},
        {"config": Input(config), "checkpoint": Input(checkpoint.node.name, checkpoint.kind.weights_files)},
        code=(*map(format_module, scheme.formats), *checkpoint.kind.code),
        labels=_labels(variant),
        cores=MANY_CORES,
        memory=checkpoint.largest * 3 + PROCESS_MEMORY,
    )


def _verify(variant: Variant, checkpoint: Checkpoint, made: str, reference: str) -> Step:
    limits = variant.verify or Verify(())
    config = checkpoint.config
    size = checkpoint.most if config is None else stored_bytes(_storage(variant), config)
    return Step(
        f"verify/{variant.name}",
        "mlcbuild.bundles.verify:verify",
        {name: None if (value := getattr(limits, name)) is None else repr(value) for name in THRESHOLDS},
        {"bundle": Input(made), "reference": Input(reference)},
        code=backend(variant.target).executor,
        cores=MANY_CORES,
        memory=size + PROCESS_MEMORY,
        needs=backend(variant.target).labels(variant.target),
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
        code=backend(variant.target).executor,
        cores=MANY_CORES,
        needs=(*backend(variant.target).labels(variant.target), machine.label(here)),
        shared=False,
        alone=True,
    )


def _labels(variant: Variant) -> dict[str, str]:
    return {"scheme": f"scheme {variant.quantization}", "target": f"target {variant.target.name}"}


@cache
def _runtime_library(target: targets.Target) -> Source | None:
    """What a library needs to run, for the bundle, where this machine's files are the target's."""
    host = targets.resolve(targets.HOST)
    stems = backend(target).runtime_files
    files = [path for stem in stems if (path := bundle.tvm_runtime(stem)) is not None]
    same = (target.system, target.architecture) == (host.system, host.architecture)
    if not stems or len(files) < len(stems) or not same or target.output != "shared":
        return None
    name = "tvm-runtime" if stems == ("libtvm_runtime",) else f"tvm-runtime/{target.device}"
    return Source(name, files[0].parent, tuple(path.name for path in files))
