"""Verbs about a recipe's text: init, validate, lock."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path

from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import InputError, UsageError
from mlcbuild.recipe import Recipe, expand, load

FIRST = """\
# For completion in an editor: mlcbuild schema recipe > recipe.schema.json
# yaml-language-server: $schema=recipe.schema.json
version: 1
models:
  mine: ./model                    # a directory in Hugging Face format, or hf://organisation/name@revision
quantizations: [q4f16_1, q0f32]    # `mlcbuild schemes` lists them
targets: [host]                    # `mlcbuild targets` lists them
compile: {max_batch: 4}
bundle: {output: "dist/{model}-{quantization}-{target}"}
"""


def settings(pairs: list[str]) -> dict[str, str]:
    """`--set` options. Raises UsageError."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"mlcbuild: --set {pair}: write --set name=value")
        found[name] = value
    return found


def read_recipe(arguments: argparse.Namespace, with_models: bool = False) -> Recipe:
    """The recipe that a command line names; `with_models` looks into local checkpoints as well."""
    from mlcbuild.prospect import faults

    gc.set_threshold(200_000, 10, 10)  # variants and steps live to the end: little of them is ever garbage
    path, values = Path(arguments.recipe), settings(arguments.settings)
    if with_models:
        return load(path, values, arguments.allow_outside, faults)
    return load(path, values, arguments.allow_outside)


def read_lock(recipe: Recipe) -> Lock:
    """The recipe's lock, complete; an empty one for a recipe whose sources are all local."""
    from mlcbuild.checkpoints import lock as locks
    from mlcbuild.pipeline import hub_sources

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


def init(arguments: argparse.Namespace) -> int:
    directory = Path(arguments.directory)
    path = directory / "recipe.yaml"
    if path.exists():
        raise UsageError(f"{path}: it exists already; it was not changed")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(FIRST, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    print(f"{path}: put a checkpoint into {directory / 'model'}, then run `mlcbuild run {path}`")
    return 0


def validate(arguments: argparse.Namespace) -> int:
    """With --json, problems are facts: they go to stdout as a document."""
    from mlcbuild.checkpoints import lock as locks
    from mlcbuild.pipeline import hub_sources
    from mlcbuild.prospect import check

    try:
        recipe = read_recipe(arguments, with_models=True)
        check(recipe)
        if recipe.lock.exists() and hub_sources(recipe):
            locks.read(recipe.lock)
    except InputError as error:
        if arguments.json:
            print(json.dumps({"problems": [vars(problem) for problem in error.problems]}, indent=2))
            return error.exit_code
        raise
    variants = expand(recipe)
    if arguments.json:
        document = {"problems": [], "variants": [{"name": v.name, "bundle": str(v.output)} for v in variants]}
        print(json.dumps(document, indent=2))
    else:
        count = f"{len(variants)} variant{'s' if len(variants) != 1 else ''}"
        print("\n".join([*(variant.name for variant in variants), f"{recipe.path}: {count}"]))
    return 0


def lock(arguments: argparse.Namespace) -> int:
    from mlcbuild.checkpoints import lock as locks
    from mlcbuild.pipeline import hub_sources

    recipe = read_recipe(arguments)
    sources = hub_sources(recipe)
    if not sources and not recipe.lock.exists():
        print(f"{recipe.path}: every source is local: there is nothing to lock")
        return 0
    known = locks.read(recipe.lock) if recipe.lock.exists() else None
    if arguments.check:
        return _check(recipe, known)
    # Without --check a lock is made anew: branches and tags are asked again.
    made = locks.resolve(sources)
    for source, locked in sorted(made.sources.items()):
        before = known.sources.get(source) if known else None
        note = f" (was {before.commit[:12]})" if before is not None and before.commit != locked.commit else ""
        print(f"{source}: {locked.commit[:12]}, {len(locked.files)} files{note}")
    wrote = locks.write(recipe.lock, made)
    print(f"{recipe.lock}: {'written' if wrote else 'unchanged'}")
    return 0


def _check(recipe: Recipe, known: Lock | None) -> int:
    from mlcbuild.checkpoints import lock as locks
    from mlcbuild.pipeline import hub_sources

    current = read_lock(recipe) if known is None else known
    locks.check(hub_sources(recipe), current, recipe.lock)
    moved = locks.moved(current)
    for source, commit in moved.items():
        pinned = current.sources[source].commit
        print(
            f"{source}: now at {commit[:12]}, pinned at {pinned[:12]}: run `mlcbuild lock` to take it",
            file=sys.stderr,
        )
    if not moved:
        print(f"{recipe.lock}: up to date")
    return 2 if moved else 0
