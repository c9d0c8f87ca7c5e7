"""Recipes: YAML -> Recipe -> Variants.

load() reads and checks a recipe and reports all problems at once, each with its place; expand() lists the
variants that it builds. recipes/README.md explains formats, names and rules for users.

    reading.py     the state that the readers of all sections share
    variables.py   vars and ${name}
    sources.py     models
    axes.py        quantizations, targets
    budgets.py     quantizations that name a budget
    cells.py       matrix
    matrix.py      semantics of include and exclude, on names only
    settings.py    compile, verify, bench
    outputs.py     bundle.output
    cache.py       cache
    destinations.py  publish
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.documents import schema
from mlcbuild.documents.document import read
from mlcbuild.errors import MOST_PROBLEMS, InputError, Problem, Problems
from mlcbuild.quant import Scheme
from mlcbuild.recipe import outputs
from mlcbuild.recipe.axes import read_schemes, read_targets
from mlcbuild.recipe.cache import read_remotes
from mlcbuild.recipe.cells import read_cells
from mlcbuild.recipe.destinations import read_destinations
from mlcbuild.recipe.matrix import Cell, Names
from mlcbuild.recipe.reading import Reading, kind, project_of, resolved
from mlcbuild.recipe.settings import Bench, RequestedLimits, Settings, Verify, read_bench, read_settings
from mlcbuild.recipe.sources import LocalSource, RecipeModel, Source, read_models
from mlcbuild.recipe.variables import substitute
from mlcbuild.remotes import Remote
from mlcbuild.targets.target import Target

__all__ = [
    "Bench",
    "HubSource",
    "LocalSource",
    "Recipe",
    "RecipeModel",
    "RequestedLimits",
    "Source",
    "Variant",
    "Verify",
    "expand",
    "load",
]


@dataclass(frozen=True)
class Recipe:
    """The contents of a valid recipe: models, quantizations, targets and settings."""

    path: Path
    """Path of the recipe file, as the user passed it."""
    directory: Path
    """Absolute path of the recipe's directory, to which paths in the recipe are relative."""
    name: str
    models: Mapping[str, RecipeModel]
    schemes: Mapping[str, Scheme]
    """Name of a quantization in the recipe -> its quantization scheme."""
    targets: Mapping[str, Target]
    combinations: tuple[tuple[Names, Settings], ...]
    """The combinations of model, quantization and target that the recipe builds, as pairs ((model,
    quantization, target), settings)."""
    output: str
    """Template for the path of a bundle's directory, relative to the recipe's directory, such as
    "dist/{model}-{quantization}-{target}"."""
    lock: Path
    """Absolute path of the lock file, which need not exist."""
    remotes: tuple[Remote, ...] = ()
    """The remote caches through which results are shared, in the order in which they are tried."""
    destinations: tuple[str, ...] = ()
    """Templates for the addresses to which bundles are published, such as
    "oci://host/name:{model}-{quantization}": {model}, {quantization} and {target} stand for the names of a
    bundle's variant."""
    bench: Bench | None = None
    """The numbers of prompt and answer tokens with which the speed of bundles is measured; None for no
    measurement."""


@dataclass(frozen=True)
class Variant:
    """One bundle to build: a combination of model, quantization and target with all its settings."""

    name: str
    """Name of the variant, model-quantization-target, unique in the recipe."""
    model: RecipeModel
    quantization: str
    """Name of the quantization in the recipe."""
    scheme: Scheme
    target: Target
    """The machine for which the bundle is compiled; its `name` is the name that the recipe gives it."""
    limits: RequestedLimits
    verify: Verify | None
    """Limits on the loss of accuracy that the bundle may have against its model; None if neither the recipe
    nor an `include` entry that applies has a `verify` section."""
    output: Path
    """Absolute path of the bundle's directory."""
    destinations: tuple[str, ...] = ()
    """Addresses to which the bundle of this variant is published."""
    kv_cache: str = "auto"
    """How the KV cache stores keys and values: "auto" for the floating point type of the quantization scheme,
    "int8" for 8-bit integers with scales."""


Inspect: TypeAlias = Callable[[Iterable[RecipeModel]], Iterable[Problem]]
"""Function of the models of a recipe that yields a `Problem` (file, line, column, message) for each of their
faults, so that loading the recipe reports them together with all others."""


def load(
    path: Path,
    settings: Mapping[str, str] | None = None,
    allow_outside: bool = False,
    inspect: Inspect = lambda models: (),
) -> Recipe:
    """Reads and checks a recipe, and returns it. settings: variable name -> value that replaces the recipe's;
    allow_outside: True if paths may leave the recipe's project; inspect: function that yields further
    problems of the recipe's models.

    Raises InputError with all problems of the file, or with 1000 of them if it has more, also if the file
    cannot be read or a target preset of mlcbuild is invalid; SetupError if these presets are missing.
    """
    document = read(path)
    done = substitute(document, settings or {})
    document = schema.typed(done.document, "recipe")
    directory = path.absolute().parent
    wrong = (item for item in schema.findings(document, "recipe") if item.where not in done.failed)
    findings = list(islice(wrong, MOST_PROBLEMS + 1))
    reading = Reading(
        document,
        directory,
        project_of(directory),
        allow_outside,
        frozenset(done.failed).union(item.where for item in findings),
        frozenset(item.where for item in findings if item.on_key),
        done.origins,
        Problems([*document.problems, *done.problems]),
    )
    for item in findings:
        if not item.is_misspelt:
            reading.report(item.where, item.message, item.on_key)
    recipe = _read(reading, path, inspect)
    if reading.problems or recipe is None:
        raise InputError(reading.problems)
    return recipe


def expand(recipe: Recipe) -> tuple[Variant, ...]:
    """Returns the variants (bundles to build) of a recipe, in the order of its combinations of model,
    quantization and target."""
    variants = []
    for names, settings in recipe.combinations:
        model, quantization, target = names
        variants.append(
            Variant(
                "-".join(names),
                recipe.models[model],
                quantization,
                recipe.schemes[quantization],
                recipe.targets[target],
                settings.limits,
                settings.verify,
                recipe.directory / outputs.render(recipe.output, names),
                tuple(outputs.render(template, names) for template in recipe.destinations),
                settings.kv_cache,
            )
        )
    return tuple(variants)


def _inputs(
    models: Mapping[str, RecipeModel], schemes: Iterable[Scheme], settings: Iterable[Settings]
) -> dict[str, Path]:
    """Returns words for messages, such as "the model 'a'" -> path, for every local file and directory that
    build steps read and that bundles must not replace."""
    paths = {
        f"the model '{name}'": model.source.path
        for name, model in models.items()
        if isinstance(model.source, LocalSource)
    }
    for name, model in models.items():
        for i, adapter in enumerate(model.adapters, 1):
            if isinstance(adapter.source, LocalSource):
                paths[f"adapter {i} of the model '{name}'"] = adapter.source.path
    for scheme in schemes:
        if isinstance(scheme.calibration, Path):
            paths[f"the prompts {scheme.calibration}"] = scheme.calibration
    for item in settings:
        if item.verify and isinstance(item.verify.prompts, Path):
            paths[f"the prompts {item.verify.prompts}"] = item.verify.prompts
    return paths


def _read(reading: Reading, path: Path, inspect: Inspect) -> Recipe | None:
    """Returns the recipe whose data, validated by the JSON schema, is in `reading`. Problems that the schema
    does not cover are added to the recipe's list of problems; the result then lacks what is invalid, and is
    None if the template of output directories or the path of the lock file is. path: the recipe file;
    inspect: function that yields further problems of its models."""
    models, schemes, targets = read_models(reading), read_schemes(reading), read_targets(reading)
    reading.problems.extend(inspect(models.values()))
    cells = read_cells(reading)
    settings = read_settings(reading, {cell.includes for cell in cells} or {()})
    template = outputs.read_template(reading)
    lock = _lock(reading, path)
    remotes = read_remotes(reading)
    destinations = read_destinations(reading, [cell.names for cell in cells])
    if template is None or lock is None:
        return None
    protected = {
        "the recipe": path.absolute(),
        "the lock file": lock,
        **_inputs(models, schemes.values(), settings.values()),
    }
    _check_sizes(reading, cells, schemes, settings)
    outputs.check(reading, template, [cell.names for cell in cells], protected)
    name = reading.text("name") or re.sub(r"[^A-Za-z0-9._-]|^\.", "-", path.stem)
    return Recipe(
        path,
        reading.directory,
        name,
        models,
        schemes,
        targets,
        tuple((cell.names, settings[cell.includes]) for cell in cells),
        template,
        lock,
        remotes,
        destinations,
        read_bench(reading),
    )


MOST_OVERRIDES = 100_000
"""Maximum number of overrides of quantization schemes in a recipe, summed over all combinations of model,
quantization and target, since each step holds its overrides."""
MOST_PROMPTS = 1 << 26
"""Maximum number of characters of the prompts written in a recipe, summed over all combinations of model,
quantization and target, since each of them is verified with its prompts."""


def _check_sizes(
    reading: Reading,
    cells: Iterable[Cell],
    schemes: Mapping[str, Scheme],
    settings: Mapping[tuple[int, ...], Settings],
) -> None:
    """Adds a problem to the recipe's list for each limit that the combinations of model, quantization and
    target to build exceed in total: 100,000 overrides of quantization schemes, and 2**26 characters of
    verification prompts that are written in the recipe. schemes: name of a quantization -> its scheme;
    settings: indices of the `include` entries that apply to a combination -> the resulting settings."""
    sizes = {
        use: sum(map(len, item.verify.prompts))
        for use, item in settings.items()
        if item.verify and isinstance(item.verify.prompts, tuple)
    }
    overrides = prompts = 0
    for cell in cells:
        scheme = schemes.get(cell.names[1])
        overrides += len(scheme.overrides) if scheme else 0
        prompts += sizes.get(cell.includes, 0)
    if overrides > MOST_OVERRIDES:
        message = f"combinations and their overrides are {overrides}; at most {MOST_OVERRIDES} are allowed"
        reading.report(("quantizations",), message, on_key=True)
    if prompts > MOST_PROMPTS:
        message = f"prompts of all combinations have {prompts} letters; write them to a file and name that"
        reading.report(("verify",), message, on_key=True)


def _lock(reading: Reading, path: Path) -> Path | None:
    """Returns the absolute path of the lock file: the one that the recipe names, or the recipe's path with
    .lock in place of its suffix; None, with a problem added to those of the recipe, if the named one is
    invalid or leaves the project. A lock file that would replace the recipe, whose name is too long, or that
    is no regular file, is also a problem of the recipe, but returned. path: the recipe file."""
    text = reading.text("lock")
    lock = path.absolute().with_suffix(".lock") if text is None else reading.path(("lock",), text)
    if lock is not None and resolved(lock) == resolved(path):
        reading.report(("lock",), "the lock file would replace the recipe: name another one", on_key=True)
    elif lock is not None and (fault := reading.unwritable(lock.name)):
        reading.report(("lock",), f"the lock file '{lock.name}' {fault}", on_key=True)
    elif lock is not None and (file_kind := kind(lock)) not in ("missing", "a regular file"):
        reading.report(("lock",), f"the lock file {lock.name} is {file_kind}; remove it, or name another one")
    return lock
