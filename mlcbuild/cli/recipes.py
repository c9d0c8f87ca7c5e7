"""The verbs for the text of a recipe: init, validate, lock."""

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
    """Parses `--set` options into name -> value. Raises UsageError."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"mlcbuild: --set {pair}: write --set name=value")
        values[name] = value
    return values


def open_session(arguments: argparse.Namespace, remotes: Sequence[Remote] | None = None) -> Session:
    """Opens the recipe that a command line names; `remotes` replace those of the recipe."""
    from mlcbuild import session

    # variants and steps live until the process ends, so frequent garbage collection finds little
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
    """Validates a recipe; with --json, problems are part of the document on stdout."""
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
