"""Writes the first recipe for a model, as the command `mlcbuild init` does."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from mlcbuild.checkpoints.hub import parse_source
from mlcbuild.errors import UsageError
from mlcbuild.installed.default_scheme import choose_scheme, parameter_count
from mlcbuild.installed.entries import check_path, slug
from mlcbuild.installed.resolve import machine_words

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


@dataclass(frozen=True)
class FirstRecipe:
    """The result of `mlcbuild init` for a model: the path of the recipe that it wrote, and the commands to
    use next."""

    path: Path
    checkpoint: Path | None
    """The directory, beside the new recipe, into which the user must still put the model's checkpoint; None
    if the recipe names an existing checkpoint or an hf:// address."""
    commands: tuple[str, ...]
    """The commands, as a user types them, that build the recipe, in order; for a model on the hub, `mlcbuild
    lock` comes first."""


def write(model: str) -> FirstRecipe:
    """Writes recipe.yaml, a first recipe for a model, and returns its path with the commands that build it.
    It is written into the current directory if `model` is an hf:// address, a GGUF file or the directory of a
    checkpoint; otherwise into the directory `model`, which is created and to which the user will add a
    checkpoint. Raises UsageError for another or a malformed address, if the recipe exists or cannot be
    written, if the GGUF file is missing, or if the checkpoint is the working directory or its path is not
    UTF-8, and SetupError if this machine's system is not supported."""
    if "://" in model and not model.startswith("hf://"):
        raise UsageError(
            f"'{model}': a recipe's model is a directory, a GGUF file, or hf://organisation/name"
        )
    is_model = model.startswith("hf://") or Path(model).suffix == ".gguf" or (Path(model) / CONFIG).is_file()
    directory = Path() if is_model else Path(model)
    path = directory / "recipe.yaml"
    if path.exists():
        raise UsageError(f"{path}: it exists already; it was not changed")
    name, source = (slug(model), _source(model)) if is_model else ("mine", "./model")
    is_remote = parse_source(model) is not None
    count = parameter_count(model) if is_model else None
    choice = choose_scheme(machine_words(), count)
    reason = choice.reason
    if is_remote and count is None:
        reason = f"{reason}; the model's size could not be read from the hub"
    text = FIRST.format(name=name, source=source, scheme=choice.scheme, reason=reason)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    outside = " --allow-outside" if is_model and not is_remote and not source.startswith('"./') else ""
    lock = (f"mlcbuild lock {path}",) if is_remote else ()
    commands = (*lock, f"mlcbuild run {path}{outside}")
    return FirstRecipe(path, None if is_model else directory / "model", commands)


def _source(model: str) -> str:
    """Returns the model's path or hf:// address as YAML text in double quotes; a relative path that stays in
    the working directory begins with "./". Raises UsageError if the path does not exist, is not UTF-8, or is
    the working directory, into which bundles would be written."""
    if "://" in model:
        return json.dumps(model, ensure_ascii=False)
    path = Path(model)
    if not path.exists():
        raise UsageError(f"{path}: there is no such file")
    check_path(model)
    if path.resolve() == Path.cwd():
        raise UsageError(
            f"{path.resolve()} is the checkpoint itself: go to the directory above, and repeat it"
        )
    normal = os.path.normpath(path)
    is_below = not path.is_absolute() and normal.split("/")[0] != ".."
    return json.dumps(f"./{normal}" if is_below else str(path), ensure_ascii=False)
