"""Models of a recipe and where their checkpoints come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mlcbuild.document import Place, Where
from mlcbuild.errors import UsageError, did_you_mean
from mlcbuild.hub import HubSource, parse_source
from mlcbuild.recipe.reading import Reading, kind

_HUB = "hf://"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_PAGE = re.compile(rf"https?://(?:www\.)?huggingface\.co/({_PART}/{_PART})(?:/.*)?")


@dataclass(frozen=True)
class LocalSource:
    path: Path
    """An existing directory, absolute."""


Source: TypeAlias = LocalSource | HubSource


@dataclass(frozen=True)
class Model:
    name: str
    source: Source
    place: Place
    """Where the recipe gives the source."""


def read_models(reading: Reading) -> dict[str, Model]:
    """The models whose source is right; the others are reported."""
    models: dict[str, Model] = {}
    for name in reading.mapping("models"):
        where: Where = ("models", name)
        if reading.text(*where) is None:
            where = (*where, "source")
        text = reading.text(*where)
        source = _read_source(reading, where, text) if text else None
        if source is not None:
            models[name] = Model(name, source, reading.document.place(where))
    return models


def _read_source(reading: Reading, where: Where, text: str) -> Source | None:
    page = _HUB_PAGE.fullmatch(text)
    if page:
        reading.report(where, f"source '{text}' is a page of the Hugging Face hub; write {_HUB}{page[1]}")
        return None
    try:
        hub = parse_source(text)
    except UsageError as error:
        reading.report(where, str(error))
        return None
    return hub or _local(reading, where, text)


def _local(reading: Reading, where: Where, text: str) -> LocalSource | None:
    path = reading.path(where, text)
    if path is None:
        return None
    found_there = kind(path)
    if found_there == "directory":
        return LocalSource(path)
    reading.report(where, _not_a_directory(path, text, found_there))
    return None


def _not_a_directory(path: Path, text: str, found: str) -> str:
    if found == "file":
        return f"'{text}' is a file; a source is the directory of a checkpoint"
    if re.fullmatch(f"{_PART}/{_PART}", text):
        return f"there is no directory '{text}'; for a model of the Hugging Face hub write {_HUB}{text}"
    try:
        siblings = [item.name for item in path.parent.iterdir() if kind(item) == "directory"]
    except OSError:
        siblings = []
    hint = did_you_mean(path.name, siblings) if siblings else ""
    return f"there is no directory '{text}'" + (f"; {hint}" if hint.startswith("did") else "")
