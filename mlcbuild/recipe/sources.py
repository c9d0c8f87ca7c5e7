"""Models of a recipe and where their checkpoints come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mlcbuild.document import Place, Where
from mlcbuild.errors import did_you_mean
from mlcbuild.recipe.reading import Reading, kind

_HUB = "hf://"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_SOURCE = re.compile(rf"hf://({_PART}/{_PART})(?:@({_PART}(?:/{_PART})*))?")
_HUB_PAGE = re.compile(rf"https?://(?:www\.)?huggingface\.co/({_PART}/{_PART})(?:/.*)?")
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class LocalSource:
    path: Path
    """An existing directory, absolute."""


@dataclass(frozen=True)
class HubSource:
    repository: str
    """organisation/name"""
    revision: str = "main"
    """A branch, a tag or a commit."""

    @property
    def is_pinned(self) -> bool:
        """The revision is a full commit, which names the same files for ever."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{_HUB}{self.repository}@{self.revision}"


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
    found = _HUB_SOURCE.fullmatch(text)
    if found and ".." not in text:
        return HubSource(found[1], found[2] or "main")
    if text.startswith("hf:"):
        reading.report(where, f"'{text}' must be hf://organisation/name or hf://organisation/name@revision")
        return None
    if "://" in text:
        page = _HUB_PAGE.fullmatch(text)
        instead = f"write {_HUB}{page[1]}" if page else "write a directory or hf://organisation/name@revision"
        reading.report(where, f"'{text}' is not a source that mlcbuild can fetch; {instead}")
        return None
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
