"""The verbs `init`, `validate` and `lock`, for the text of a recipe."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild.errors import InputError, UsageError

if TYPE_CHECKING:
    from mlcbuild.remotes import Remote
    from mlcbuild.session import Session


def settings(pairs: list[str]) -> dict[str, str]:
    """Parses `--set name=value` options into name -> value; of several options for a name, the last one
    counts. Raises UsageError for any other text."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"mlcbuild: --set {pair}: write --set name=value")
        values[name] = value
    return values


def open_session(arguments: argparse.Namespace, remotes: Sequence[Remote] | None = None) -> Session:
    """Opens the recipe that a command line names, and returns it as a Session. remotes: remote caches that
    replace those of the recipe; None: the recipe's own. With the option --no-remote there are none. Raises
    InputError for mistakes in the recipe, its models or its lock, UsageError for sources that are not locked
    and for wrong --set options, StoreError for a store of another format."""
    from mlcbuild import session

    # Variants and steps live until the process ends, so frequent garbage collection would free little.
    gc.set_threshold(200_000, 10, 10)
    none = getattr(arguments, "no_remote", False)
    return session.open(
        arguments.recipe,
        store=arguments.store or None,
        remotes=() if none else remotes,
        settings=settings(arguments.settings),
        allow_outside=arguments.allow_outside,
    )


def init(arguments: argparse.Namespace) -> int:
    from mlcbuild.installed.first_recipe import write

    recipe = write(arguments.model)
    before = "" if recipe.checkpoint is None else f"put a checkpoint into {recipe.checkpoint}, then "
    print(f"{recipe.path}: {before}run {', then '.join(f'`{command}`' for command in recipe.commands)}")
    return 0


def validate(arguments: argparse.Namespace) -> int:
    """Runs the verb `validate`: checks a recipe and prints its variants. Raises InputError with all problems
    of the recipe; with --json, they are part of the document on standard output instead, and the exit code is
    2."""
    from mlcbuild.locking import check

    try:
        variants = check(
            arguments.recipe, settings=settings(arguments.settings), allow_outside=arguments.allow_outside
        )
    except InputError as error:
        if arguments.json:
            print(json.dumps({"problems": [vars(problem) for problem in error.problems]}, indent=2))
            return error.exit_code
        raise
    if arguments.json:
        document = {"problems": [], "variants": [{"name": v.name, "bundle": str(v.output)} for v in variants]}
        print(json.dumps(document, indent=2))
    else:
        count = f"{len(variants)} variant{'s' if len(variants) != 1 else ''}"
        print("\n".join([*(variant.name for variant in variants), f"{Path(arguments.recipe)}: {count}"]))
    return 0


def lock(arguments: argparse.Namespace) -> int:
    from mlcbuild import locking

    values, outside = settings(arguments.settings), arguments.allow_outside
    if arguments.check:
        path, moved = locking.moved(arguments.recipe, settings=values, allow_outside=outside)
        for source, (pinned, commit) in moved.items():
            print(
                f"{source}: now at {commit[:12]}, pinned at {pinned[:12]}: run `mlcbuild lock` to pin that",
                file=sys.stderr,
            )
        if not moved:
            print(f"{path}: up to date" if path.exists() else _all_local(arguments.recipe))
        return 2 if moved else 0
    path, sources, wrote = locking.lock(arguments.recipe, settings=values, allow_outside=outside)
    for row in sources:
        note = f" (was {row.before[:12]})" if row.before is not None and row.before != row.commit else ""
        print(f"{row.source}: {row.commit[:12]}, {row.files} files{note}")
    if not sources and not path.exists():
        print(_all_local(arguments.recipe))
    else:
        print(f"{path}: {'written' if wrote else 'unchanged'}")
    return 0


def _all_local(recipe: str) -> str:
    return f"{Path(recipe)}: every source is local: there is nothing to lock"
