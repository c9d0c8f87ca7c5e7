"""Translates the variants of a recipe into steps. No other module depends on both steps and models. The names
of steps, and their results:

fetch/<model>                              the checkpoint: a directory of the user, or a download
config/<model>                             config.json, normalised
tokenizer/<model>                          tokenizer, template, serving defaults
reference/<model>                          logits of the prompts, in NumPy
formats/<model>/<quantization>             the formats of `as-is`, for a model that the run downloads
calibrate/<model>                          how much each column of a matrix counts, in the recipe's prompts
sensitivity/<model>                        the loss of each matrix in each format of a budget
budget/<model>/<quantization>              the formats that a budget chooses
weights/<model>/<scheme>/<layout>          packed weights
library/<config>/<scheme>/<target>         compiled code; it depends neither on weights nor on the model's
                                           name
bundle/<variant>                           all of these together
verify/<variant>                           the bundle compared with the reference
bench/<variant>                            the speed of the bundle on this kind of machine
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from mlcbuild import quant
from mlcbuild.build.graph import Graph, Input, Node, Source, Step, StepDisplay
from mlcbuild.bundles import assemble as bundle
from mlcbuild.bundles.reference_logits import PROMPTS
from mlcbuild.canon import Json, digest, file_digest
from mlcbuild.check_steps import bench_step, verify_step
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import SetupError
from mlcbuild.models import ModelConfig
from mlcbuild.models.parsing import family_module
from mlcbuild.prospect import Checkpoint, examined, with_formats
from mlcbuild.quant import importance
from mlcbuild.quant.format import format_module
from mlcbuild.recipe import Bench, Recipe, Variant, expand
from mlcbuild.targets import presets
from mlcbuild.targets import target as targets
from mlcbuild.targets.backends import backend
from mlcbuild.weight_steps import (
    BUDGET_FILES,
    budget_step,
    choice_input,
    exact_step,
    formats_step,
    labels_of,
    scheme_params,
    sensitivity_step,
    storage_of,
    weights_step,
)

UNVERIFIED = "verification was not requested"
"""The reason that is reported for bundles that are not verified because the caller did not request
verification."""
COMPILER_MEMORY = 600 << 20
"""Bytes of memory reserved for a compiling process: 0.27 GB were measured for a model of 30 layers, with any
scheme."""
_COMPILING = 10.0
"""Typical time of compiling a library in seconds: 5 to 10 with any model, since layers share kernels. Half of
it passes before LLVM compiles the first function, from when on progress is reported."""


@dataclass(frozen=True)
class Product:
    """The names of the steps that build and check one variant of a recipe."""

    variant: Variant
    steps: tuple[str, ...]
    """Names of the steps that build and verify one variant of a recipe, those shared with other variants
    included. Its sources (`fetch/<model>`, whether a download or a local directory) and the measurement of
    its speed are left out."""
    library: str
    bundle: str
    verify: str | None
    unverified: str = ""
    """The reason why the variant is not verified, such as that the caller did not request it; "" if it is
    verified."""
    bench: str | None = None
    """Name of the step that measures the bundle's speed; None if there is no such step. The bundle does not
    depend on this step.
    """

    @property
    def last(self) -> str:
        return self.verify or self.bundle

    @property
    def ends(self) -> tuple[str, ...]:
        """Returns the names of the last steps of one variant of a recipe, whose results no other step reads:
        the verification or, without it, the bundle; and the measurement of speed, if there is one."""
        return (self.last,) if self.bench is None else (self.last, self.bench)


@dataclass(frozen=True)
class Pipeline:
    """The steps of a recipe, with their dependency graph and the variants that they build."""

    recipe: Recipe
    graph: Graph
    products: tuple[Product, ...]
    configs: Mapping[str, ModelConfig]
    """Name of a model of the recipe -> its config, for models that are local checkpoints; the config of a
    model on a hub is not read before the run."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Name of a step that cannot run here -> what this machine lacks and the user must install."""
    recipe_digest: str = ""
    """BLAKE3 digest of the recipe's file, in hex, when it was read. The file may change during a run."""

    def choose(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Returns the names of steps that patterns choose. patterns: names or globs; one that matches
        variants chooses their last steps, any other the steps that it matches. Raises UsageError for a
        pattern that matches nothing."""
        chosen: list[str] = []
        for pattern in patterns:
            matching = [item for item in self.products if fnmatchcase(item.variant.name, pattern)]
            chosen += [end for item in matching for end in item.ends] or sorted(self.graph.match([pattern]))
        return tuple(dict.fromkeys(chosen))

    def unverified(self) -> Pipeline:
        """Returns a copy of this pipeline with only the steps that bundles need: without verification,
        reference logits for it, and measurements of speed."""
        products = tuple(self._until_bundle(item) for item in self.products)
        needed_steps = self.graph.closure(item.bundle for item in products)
        nodes = (node for name, node in self.graph.nodes.items() if name in needed_steps)
        return replace(self, graph=Graph(nodes), products=products)

    def _until_bundle(self, product: Product) -> Product:
        """Returns a copy of `product`, the step names of one variant, that ends with its bundle, without
        verification and measurement of speed. Each name is replaced by the one under which the dependency
        graph holds the step."""
        resolve = self.graph.resolve
        return Product(
            product.variant,
            tuple(map(resolve, product.steps[: product.steps.index(product.bundle) + 1])),
            resolve(product.library),
            resolve(product.bundle),
            None,
            UNVERIFIED,
        )


def build(recipe: Recipe, lock: Lock) -> Pipeline:
    """Translates a recipe into the steps of all its variants. lock: the pinned files of every model and
    adapter on a hub that the recipe names; only configs of local checkpoints are read.

    Raises InputError, with positions in the recipe, for models that cannot be built or do not fit their
    variants.
    """
    recipe_digest = file_digest(recipe.path)
    variants = expand(recipe)
    checkpoints = examined(recipe, variants, lock)
    assembly = _Assembly(recipe.directory, checkpoints, recipe.bench)
    products = tuple(assembly.add(variant) for variant in with_formats(variants, checkpoints))
    configs = {name: item.config for name, item in checkpoints.items() if item.config is not None}
    lacks = {item.library: words for item in products if (words := assembly.lacks.get(item.variant.target))}
    return Pipeline(recipe, Graph(assembly.nodes.values()), products, configs, lacks, recipe_digest)


def hub_sources(recipe: Recipe) -> tuple[HubSource, ...]:
    """Returns the repositories on a hub, of models and adapters, that a recipe names and its lock file must
    pin, in the recipe's order; one that it names twice is listed twice."""
    sources = (source for model in recipe.models.values() for source in model.sources)
    return tuple(source for source in sources if isinstance(source, HubSource))


@dataclass
class _Assembly:
    """Collects the steps and source files of a recipe, from which its dependency graph is built. Each is
    added once."""

    directory: Path
    """Absolute path of the recipe's directory, to which paths in the recipe are relative."""
    checkpoints: Mapping[str, Checkpoint]
    bench: Bench | None
    nodes: dict[str, Node] = field(default_factory=dict)
    configs: dict[str, str] = field(default_factory=dict)
    """First 12 digits of the digest of a model's config, or, for a model on a hub, of its config file -> name
    of the first step that produces this config."""
    tools: dict[targets.Target, Mapping[str, str]] = field(default_factory=dict)
    lacks: dict[targets.Target, str] = field(default_factory=dict)
    """Target -> message that names what this machine lacks for building for this target; targets for which
    nothing is missing have no entry."""

    def add(self, variant: Variant) -> Product:
        checkpoint = self.checkpoints[variant.model.name]
        kind = checkpoint.kind
        source = self._keep(checkpoint.node)
        for node in checkpoint.adapters:
            self._keep(node)
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
        budget = self._budget(variant, checkpoint, config, tokenizer)
        chosen = choice_input(budget[-1]) if budget else {}
        calibrated = self._calibration(variant, checkpoint, config, tokenizer)
        weights = self._keep_apart(weights_step(variant, checkpoint, config, chosen, calibrated))
        library = self._library(variant, checkpoint, config, chosen)
        parts = {"library": library, "weights": weights, "tokenizer": tokenizer}
        bundle = self._bundle(variant, parts, budget[-1] if budget else None, calibrated)
        steps = tuple(filter(None, (config, tokenizer, *budget, calibrated, weights, library, bundle)))
        why_not = backend(variant.target).can_run(variant.target, presets.resolve(presets.HOST))
        if why_not is not None:
            return Product(variant, steps, library, bundle, None, why_not)
        reference = self._reference(variant, checkpoint, config, tokenizer)
        verify = self._keep(verify_step(variant, checkpoint, bundle, reference))
        bench = None if self.bench is None else self._keep(bench_step(variant, self.bench, bundle))
        return Product(
            variant, (*dict.fromkeys((*steps, reference, verify)),), library, bundle, verify, bench=bench
        )

    def _keep(self, node: Node) -> str:
        self.nodes.setdefault(node.name, node)
        return node.name

    def _keep_apart(self, step: Step) -> str:
        """Adds a step to the graph and returns its name. If a different step has the name already, a digest
        is appended to it.

        The first step keeps the short name, so that a later change shows as a change and not as a new step.
        """
        if self.nodes.get(step.name, step) == step:
            return self._keep(step)
        inputs = {argument: [item.node, *item.select] for argument, item in step.inputs.items()}
        return self._keep(replace(step, name=f"{step.name}/{digest('step/1', [step.params, inputs])[:8]}"))

    def _budget(
        self, variant: Variant, checkpoint: Checkpoint, config: str, tokenizer: str
    ) -> tuple[str, ...]:
        """Adds the steps that choose a format for each matrix to the build graph, for a variant with a budget
        or with `as-is` for a checkpoint on a hub, and returns their names; the step with the choice is the
        last. Returns () for any other variant."""
        if variant.scheme.choices:
            return (self._keep_apart(formats_step(variant, checkpoint, config)),)
        if variant.scheme.budget is None:
            return ()
        reference = self._reference(variant, checkpoint, config, tokenizer)
        sensitivity = self._keep_apart(sensitivity_step(variant, checkpoint, config, reference))
        step = budget_step(variant, checkpoint, config, reference, sensitivity)
        return reference, sensitivity, self._keep_apart(step)

    def _library(
        self, variant: Variant, checkpoint: Checkpoint, config: str, chosen: Mapping[str, Input]
    ) -> str:
        limits: dict[str, Json] = dict(vars(variant.limits))
        options: dict[str, Json] = {} if variant.kv_cache == "auto" else {"kv_cache": variant.kv_cache}
        scheme = storage_of(variant)
        return self._keep_apart(
            Step(
                f"library/{checkpoint.label}/{variant.quantization}/{variant.target.name}",
                backend(variant.target).action,
                {
                    **scheme_params(scheme),
                    "target": targets.to_json(variant.target),
                    "limits": limits,
                    **options,
                },
                # Models with equal configs share this node, so that they also share one library step.
                {
                    "config": Input(self.configs.setdefault(checkpoint.label, config), ("config.json",)),
                    **chosen,
                },
                tools=self._tools(variant.target),
                code=(
                    *map(format_module, scheme.formats),
                    *backend(variant.target).kernel_modules(scheme),
                ),
                display=StepDisplay(labels_of(variant), variant.model.name, _COMPILING),
                memory=COMPILER_MEMORY,
            )
        )

    def _tools(self, target: targets.Target) -> Mapping[str, str]:
        """Returns name -> version of the tools that compile and link for a target. The result is cached,
        because computing it runs the tools. If one is missing, adds the error message to `lacks`, and returns
        {"linker": "none"}."""
        if target not in self.tools:
            try:
                self.tools[target] = backend(target).tool_versions(target)
            except SetupError as error:
                self.lacks[target] = str(error)
                # The step reports the missing linker when it runs, so that the rest of the recipe can be
                # built.
                self.tools[target] = {"linker": "none"}
        return self.tools[target]

    def _bundle(
        self, variant: Variant, steps: Mapping[str, str], budget: str | None, calibrated: str | None
    ) -> str:
        """Adds the step that assembles a variant's bundle to the build graph, and returns the step's name.
        steps: "library", "weights" and "tokenizer" -> name of the step that provides it. budget: name of the
        step that chose stored formats under a budget or for a quantized checkpoint, or None. calibrated: name
        of the step that measured activations, or None."""
        inputs = {argument: Input(step) for argument, step in steps.items()}
        if calibrated is not None:
            inputs[importance.INPUT] = Input(calibrated, (importance.REPORT,))
        if variant.scheme.budget is not None and budget is not None:
            inputs["budget"] = Input(budget, BUDGET_FILES)
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
                    "scheme": None if budget is not None else quant.describe(storage_of(variant)),
                    "target": {**targets.to_json(variant.target), "name": variant.target.name},
                },
                inputs,
                display=StepDisplay(labels_of(variant)),
            )
        )

    def _reference(self, variant: Variant, checkpoint: Checkpoint, config: str, tokenizer: str) -> str:
        prompts = variant.verify.prompts if variant.verify is not None else PROMPTS
        inputs = {"config": config, "tokenizer": tokenizer}
        action = "mlcbuild.bundles.reference_logits:reference"
        read = self._prompt_inputs(inputs, prompts)
        name = f"reference/{checkpoint.name}"
        return self._keep_apart(exact_step(name, action, variant, checkpoint, read, prompts))

    def _calibration(
        self, variant: Variant, checkpoint: Checkpoint, config: str, tokenizer: str
    ) -> str | None:
        """Adds a step to the build graph that measures, on prompts, how much each column of the model's
        matrices counts when weights are rounded, and returns the step's name. Returns None if the variant's
        quantization scheme has no calibration prompts."""
        if (prompts := variant.scheme.calibration) is None:
            return None
        inputs = self._prompt_inputs({"config": config, "tokenizer": tokenizer}, prompts)
        name, action = f"calibrate/{checkpoint.name}", "mlcbuild.bundles.calibration:calibrate"
        return self._keep_apart(exact_step(name, action, variant, checkpoint, inputs, prompts))

    def _prompt_inputs(self, steps: Mapping[str, str], prompts: Path | tuple[str, ...]) -> dict[str, Input]:
        """Returns name of an input -> `Input` (a step or source whose files the input consists of), for a
        step that reads prompts. steps: name of an input -> name of the step that provides it. prompts: path
        of a file, which becomes a source of the graph and the input "prompts", or the texts, which become no
        input."""
        inputs = {argument: Input(step) for argument, step in steps.items()}
        if isinstance(prompts, Path):
            source = f"prompts/{Path(os.path.relpath(prompts, self.directory)).as_posix()}"
            inputs["prompts"] = Input(self._keep(Source(source, prompts.parent, (prompts.name,))))
        return inputs


@cache
def _runtime_library(target: targets.Target) -> Source | None:
    """Returns the files of TVM's runtime (shared libraries on this machine) that a bundle for `target`
    includes, as a source of the build: a directory and the names of files in it. Returns None if the bundle
    needs none, such as one whose library is linked statically, if a file is missing, or if this machine has
    another operating system or architecture than the target."""
    host = presets.resolve(presets.HOST)
    stems = backend(target).runtime_files
    files = [path for stem in stems if (path := bundle.tvm_runtime(stem)) is not None]
    same = (target.system, target.architecture) == (host.system, host.architecture)
    if not stems or len(files) < len(stems) or not same or target.output != "shared":
        return None
    name = "tvm-runtime" if stems == ("libtvm_runtime",) else f"tvm-runtime/{target.device}"
    return Source(name, files[0].parent, tuple(path.name for path in files))
