"""Recipes: YAML -> Recipe -> Variants.

load() reads and checks a recipe and reports every problem at once, each with its place; expand() lists what
it builds. Formats, names and rules are explained for users in recipes/README.md.

    reading.py     what the readers of the sections share
    variables.py   vars and ${name}
    sources.py     models
    axes.py        quantizations, targets
    cells.py       matrix
    matrix.py      what include and exclude mean; knows names only
    settings.py    compile, verify
    outputs.py     bundle.output
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
from mlcbuild.recipe.matrix import Cell
from mlcbuild.recipe.reading import Reading, kind, project_of, resolved
from mlcbuild.recipe.settings import Bench, RequestedLimits, Settings, Verify, read_bench, read_settings
from mlcbuild.recipe.sources import LocalSource, Model, Source, read_models
from mlcbuild.recipe.variables import substitute
from mlcbuild.remotes import Remote
from mlcbuild.targets.target import Target

__all__ = [
    "Bench",
    "HubSource",
    "LocalSource",
    "Model",
    "Recipe",
    "RequestedLimits",
    "Source",
    "Variant",
    "Verify",
    "expand",
    "load",
]


@dataclass(frozen=True)
class Recipe:
    """A recipe without faults."""

    path: Path
    """As it was given to load()."""
    directory: Path
    """What paths in the recipe are relative to, absolute."""
    name: str
    models: Mapping[str, Model]
    schemes: Mapping[str, Scheme]
    """By the names of the recipe's quantizations."""
    targets: Mapping[str, Target]
    cells: tuple[Cell, ...]
    settings: Mapping[tuple[int, ...], Settings]
    """By the include entries that a cell takes settings from."""
    output: str
    """Template of a bundle's directory, relative to `directory`."""
    lock: Path
    """The lock file, absolute; it need not exist."""
    remotes: tuple[Remote, ...] = ()
    """Where results are shared, in order."""
    destinations: tuple[str, ...] = ()
    """Templates of the addresses that bundles are published to."""
    bench: Bench | None = None
    """What the speed of bundles is measured with; None: it is not."""


@dataclass(frozen=True)
class Variant:
    """One bundle to build."""

    name: str
    """model-quantization-target, unique in the recipe."""
    model: Model
    quantization: str
    """The recipe's name of the scheme."""
    scheme: Scheme
    target: Target
    """Its `name` is the recipe's."""
    limits: RequestedLimits
    verify: Verify | None
    """None: the recipe asks for nothing in particular."""
    output: Path
    """Directory of the bundle, absolute."""
    destinations: tuple[str, ...] = ()
    """Addresses that it is published to."""


Inspect: TypeAlias = Callable[[Iterable[Model]], Iterable[Problem]]
"""What else is wrong with models, so that it is reported with all other problems."""


def load(
    path: Path,
    settings: Mapping[str, str] | None = None,
    allow_outside: bool = False,
    inspect: Inspect = lambda models: (),
) -> Recipe:
    """Read a recipe. `settings` replace variables; `allow_outside` lets paths leave the recipe's project.

    Raises InputError with all problems of the file.
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
        reading.report(item.where, item.message, item.on_key)
    recipe = _read(reading, path, inspect)
    if reading.problems or recipe is None:
        raise InputError(reading.problems)
    return recipe


def expand(recipe: Recipe) -> tuple[Variant, ...]:
    """What a recipe builds, in the order of its matrix."""
    variants = []
    for cell in recipe.cells:
        model, quantization, target = cell.names
        settings = recipe.settings[cell.includes]
        variants.append(
            Variant(
                "-".join(cell.names),
                recipe.models[model],
                quantization,
                recipe.schemes[quantization],
                recipe.targets[target],
                settings.limits,
                settings.verify,
                recipe.directory / outputs.render(recipe.output, cell.names),
                tuple(outputs.render(template, cell.names) for template in recipe.destinations),
            )
        )
    return tuple(variants)


def _read(reading: Reading, path: Path, inspect: Inspect) -> Recipe | None:
    """The recipe, and every problem beyond its shape; None when there can be none."""
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
    local = {name: model.source for name, model in models.items()}
    protected = {
        "the recipe": path.absolute(),
        "the lock file": lock,
        **{f"the model '{name}'": item.path for name, item in local.items() if isinstance(item, LocalSource)},
        **{
            f"the prompts {item.verify.prompts.name}": item.verify.prompts
            for item in settings.values()
            if item.verify and isinstance(item.verify.prompts, Path)
        },
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
        cells,
        settings,
        template,
        lock,
        remotes,
        destinations,
        read_bench(reading),
    )


MOST_OVERRIDES = 100_000
"""Overrides of schemes, counted for each combination: every step of one holds them."""
MOST_PROMPTS = 1 << 26
"""Letters of prompts that the recipe itself holds, counted likewise."""


def _check_sizes(
    reading: Reading,
    cells: Iterable[Cell],
    schemes: Mapping[str, Scheme],
    settings: Mapping[tuple[int, ...], Settings],
) -> None:
    """Report what is small where it is written, and too large when every combination repeats it."""
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
    """The lock file: the one that the recipe names, or the recipe's own name with the ending .lock."""
    text = reading.text("lock")
    lock = path.absolute().with_suffix(".lock") if text is None else reading.path(("lock",), text)
    if lock is not None and resolved(lock) == resolved(path):
        reading.report(("lock",), "the lock file would replace the recipe: name another one", on_key=True)
    elif lock is not None and (fault := reading.unwritable(lock.name)):
        reading.report(("lock",), f"the lock file '{lock.name}' {fault}", on_key=True)
    elif lock is not None and (found := kind(lock)) not in ("missing", "a regular file"):
        reading.report(("lock",), f"the lock file {lock.name} is {found}; remove it, or name another one")
    return lock
