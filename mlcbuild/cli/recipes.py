"""The verbs `init`, `validate` and `lock`, for the text of a recipe."""

from __future__ import annotations

import argparse
import gc
import json
import os
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
  {name}: {source}    # a directory in Hugging Face format, a GGUF file, or hf://organisation/name@revision
quantizations: [{scheme}]    # {reason}; `mlcbuild schemes` lists all
targets: [host]    # this machine; `mlcbuild targets` lists others
compile: {{max_batch: 4}}
bundle: {{output: "dist/{{model}}-{{quantization}}-{{target}}"}}
"""
CONFIG = "config.json"


def settings(pairs: list[str]) -> dict[str, str]:
    """Parses `--set name=value` options into name -> value. Raises UsageError."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"mlcbuild: --set {pair}: write --set name=value")
        values[name] = value
    return values


def open_session(arguments: argparse.Namespace, remotes: Sequence[Remote] | None = None) -> Session:
    """Opens the recipe that a command line names. remotes: replace those of the recipe, unless they
    are None.
    """
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
    """Writes a recipe: in the current directory for an existing model, or in a new directory for a model that
    will be added.
    """
    from mlcbuild.installed.default_scheme import choose_scheme, parameter_count
    from mlcbuild.installed.entries import slug
    from mlcbuild.installed.resolve import machine_words

    model: str = arguments.model
    is_model = model.startswith("hf://") or Path(model).suffix == ".gguf" or (Path(model) / CONFIG).is_file()
    directory = Path() if is_model else Path(model)
    path = directory / "recipe.yaml"
    if path.exists():
        raise UsageError(f"{path}: it exists already; it was not changed")
    name, source = (slug(model), _source(model)) if is_model else ("mine", "./model")
    count = parameter_count(model) if is_model and "://" not in model else None
    choice = choose_scheme(machine_words(), count)
    text = FIRST.format(name=name, source=source, scheme=choice.scheme, reason=choice.reason)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    outside = "" if model.startswith("hf://") or not source.startswith(('"/', '"..')) else " --allow-outside"
    steps = [f"`mlcbuild lock {path}`"] if model.startswith("hf://") else []
    before = "" if is_model else f"put a checkpoint into {directory / 'model'}, then "
    print(f"{path}: {before}run {', then '.join([*steps, f'`mlcbuild run {path}{outside}`'])}")
    return 0


def _source(model: str) -> str:
    """Returns the source of a model as YAML, relative to this directory. Raises UsageError if the checkpoint
    is this directory, since bundles would then be written into it.
    """
    if "://" in model:
        return json.dumps(model)
    path = Path(model)
    if not path.exists():
        raise UsageError(f"{path}: there is no such file")
    if path.resolve() == Path.cwd():
        raise UsageError(
            f"{path.resolve()} is the checkpoint itself: go to the directory above, and repeat it"
        )
    is_below = not path.is_absolute() and not model.startswith("..")
    return json.dumps(f"./{os.path.normpath(path)}" if is_below else str(path))


def validate(arguments: argparse.Namespace) -> int:
    """Validates a recipe. With --json, its problems are part of the document on standard output."""
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
