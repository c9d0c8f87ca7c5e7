"""Reads a recipe with its lock file, checks both, and pins the models and adapters on a hub that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlcbuild import prospect
from mlcbuild.checkpoints import lock as locks
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import UsageError
from mlcbuild.pipeline import hub_sources
from mlcbuild.recipe import Recipe, Variant, expand, load


@dataclass(frozen=True)
class LockedSource:
    """A model or adapter on a hub that `mlcbuild lock` pinned, with the commit."""

    source: HubSource
    commit: str
    files: int
    before: str | None
    """The commit in the lock file that `mlcbuild lock` read before it pinned this model or adapter, perhaps
    the same one; None if that file did not pin it, or did not exist."""


def read_recipe(
    recipe: str | Path, settings: Mapping[str, str] | None = None, allow_outside: bool = False
) -> Recipe:
    """Reads a recipe and the configs of its local models, and returns the recipe. settings: variable name ->
    value for the recipe's vars; allow_outside: True if paths may leave the project. Raises InputError with
    all problems of the recipe and of its local models and adapters."""
    return load(Path(recipe), settings, allow_outside, prospect.faults)


def read_lock(recipe: Recipe) -> Lock:
    """Reads the lock file of a recipe, and checks that it pins every model and adapter on a hub; returns an
    empty lock if all are local.

    Raises UsageError that names all models and adapters that are not pinned yet, also if there is no lock
    file, and InputError for an invalid lock file.
    """
    sources = hub_sources(recipe)
    if not sources:
        return Lock()
    if not recipe.lock.exists():
        named = ", ".join(map(str, sources))
        raise UsageError(
            f"{recipe.path}: {named} must be pinned before it is used: run `mlcbuild lock {recipe.path}`"
        )
    lock = locks.read(recipe.lock)
    locks.check(sources, lock, recipe.lock)
    return lock


def check(
    recipe: str | Path, *, settings: Mapping[str, str] | None = None, allow_outside: bool = False
) -> tuple[Variant, ...]:
    """Checks a recipe, its local models and its lock file, and returns the variants, the combinations of
    model, quantization scheme and target to build. settings: variable name -> value, as text, for the
    recipe's vars; allow_outside: True if paths may leave the project.

    Raises InputError with all problems of the recipe or, if it has none, of what its variants require of
    local models or, if there are none, of the lock file. Models on a hub need not be pinned in the lock file
    yet.
    """
    read = read_recipe(recipe, settings, allow_outside)
    prospect.check(read)
    if read.lock.exists() and hub_sources(read):
        locks.read(read.lock)
    return expand(read)


def lock(
    recipe: str | Path, *, settings: Mapping[str, str] | None = None, allow_outside: bool = False
) -> tuple[Path, tuple[LockedSource, ...], bool]:
    """Pins every model and adapter on a hub that a recipe names at the commit that its branch or tag has now;
    pins of others are removed from the lock file. settings: variable name -> value for the recipe's vars;
    allow_outside: True if paths may leave the project.

    Returns (path of the lock file, everything that is pinned now, sorted by name, True if the file was
    written). It is not written if it is up to date, or if there is none and nothing to pin. Raises InputError
    for an invalid recipe or lock file, SourceError with a message for each repository that cannot be read
    (nothing is written then), UsageError if the lock file cannot be written.
    """
    read = load(Path(recipe), settings, allow_outside)
    sources = hub_sources(read)
    if not sources and not read.lock.exists():
        return read.lock, (), False
    old = locks.read(read.lock).sources if read.lock.exists() else {}
    new = locks.resolve(sources)
    rows = tuple(
        LockedSource(source, locked.commit, len(locked.files), old[source].commit if source in old else None)
        for source, locked in sorted(new.sources.items())
    )
    return read.lock, rows, locks.write(read.lock, new)


def moved(
    recipe: str | Path, *, settings: Mapping[str, str] | None = None, allow_outside: bool = False
) -> tuple[Path, dict[HubSource, tuple[str, str]]]:
    """Compares a recipe's lock file with the hub, and writes nothing. settings: variable name -> value for
    the recipe's vars; allow_outside: True if paths may leave the project.

    Returns (path of the lock file, source -> (pinned commit, current commit) for each branch or tag that has
    moved); sources that the recipe names by commit are not queried. Raises InputError for an invalid recipe
    or lock file, UsageError if the lock file lacks a source of the recipe or does not exist (a recipe without
    sources on a hub needs none), SourceError if the hub refuses or cannot be reached.
    """
    read = load(Path(recipe), settings, allow_outside)
    if not hub_sources(read) and not read.lock.exists():
        return read.lock, {}
    pinned = read_lock(read)
    return read.lock, {
        source: (pinned.sources[source].commit, commit) for source, commit in locks.moved(pinned).items()
    }
