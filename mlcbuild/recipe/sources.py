"""Reads the models of a recipe, and the paths or addresses of their checkpoints and adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from mlcbuild.checkpoints.hub import HubSource, parse_source
from mlcbuild.documents.document import Place, Where
from mlcbuild.errors import UsageError, did_you_mean
from mlcbuild.recipe.reading import Reading, kind

_HUB = "hf://"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_PAGE = re.compile(
    rf"https?://(?:www\.)?huggingface\.co/({_PART}/{_PART})(?:/(?:blob|resolve)/[^/]+(/.+\.gguf)|/.*)?"
)


@dataclass(frozen=True)
class LocalSource:
    """A checkpoint that is stored on this machine."""

    path: Path
    """Absolute path of a local checkpoint: an existing directory or GGUF file."""


Source: TypeAlias = LocalSource | HubSource


@dataclass(frozen=True)
class RecipeAdapter:
    """A LoRA adapter that a recipe merges into a model."""

    source: Source
    weight: float
    """Factor by which the adapter's change of the model's weights, already scaled by the adapter's own alpha
    and rank, is multiplied."""
    place: Place
    """File, line and column of the adapter's source in the recipe."""


@dataclass(frozen=True)
class RecipeModel:
    """A model of a recipe, with the adapters that are merged into it."""

    name: str
    source: Source
    place: Place
    """File, line and column of the model's source in the recipe."""
    adapters: tuple[RecipeAdapter, ...] = ()
    """The LoRA adapters of a recipe's model, in the order in which they are merged into its weights."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """Returns the sources (directory, file or address) of the model's checkpoint and of the adapters that
        are merged into it."""
        return self.source, *(adapter.source for adapter in self.adapters)


def read_models(reading: Reading) -> dict[str, RecipeModel]:
    """Reads the `models` of a recipe, and returns name -> model for those with a valid source (directory,
    GGUF file or hf:// address). For each of the others a problem is added to the recipe's list, and also for
    each invalid adapter, which the model then lacks. reading: the recipe's data and its problems."""
    siblings = cache(_directories)  # a cache, since many models may be in one directory
    models: dict[str, RecipeModel] = {}
    sources: dict[str, Source] = {}
    for name in reading.mapping("models"):
        where: Where = ("models", name)
        if reading.text(*where) is None:
            where = (*where, "source")
        text = reading.text(*where)
        source = sources.get(text) if text else None
        if source is None and text:
            source = _read_source(reading, where, text, siblings)
        if source is not None and text:
            sources[text] = source
            adapters = _read_adapters(reading, ("models", name, "adapters"), siblings)
            models[name] = RecipeModel(name, source, reading.document.place(where), adapters)
    return models


def _read_adapters(
    reading: Reading, where: Where, siblings: Callable[[Path], list[str]]
) -> tuple[RecipeAdapter, ...]:
    adapters = []
    for i in range(len(reading.items(*where))):
        place: Where = (*where, i)
        weight = None
        if reading.text(*place) is None:
            weight, place = reading.get(*place, "weight"), (*place, "source")
        text = reading.text(*place)
        source = _read_source(reading, place, text, siblings) if text else None
        if isinstance(source, LocalSource) and not source.path.is_dir():
            reading.report(place, f"'{text}' is a file; an adapter is the directory that PEFT writes")
        elif source is not None:
            factor = float(weight) if isinstance(weight, int | float) else 1.0
            adapters.append(RecipeAdapter(source, factor, reading.document.place(place)))
    return tuple(adapters)


def _read_source(
    reading: Reading, where: Where, text: str, siblings: Callable[[Path], list[str]]
) -> Source | None:
    page = _HUB_PAGE.fullmatch(text)
    if page:
        reading.report(
            where, f"source '{text}' is a page of the Hugging Face hub; write {_HUB}{page[1]}{page[2] or ''}"
        )
        return None
    try:
        hub = parse_source(text)
    except UsageError as error:
        reading.report(where, str(error))
        return None
    if hub is not None:
        return hub
    path = reading.path(where, text)
    if path is None:
        return None
    file_kind = kind(path)
    if file_kind == "a directory" or (file_kind == "a regular file" and path.suffix == ".gguf"):
        return LocalSource(path)
    if file_kind == "missing":
        reading.report(where, _absent(path, text, siblings))
    else:
        file_words = "a file" if file_kind == "a regular file" else file_kind
        reading.report(
            where, f"'{text}' is {file_words}; a source is the directory of a checkpoint, or a GGUF file"
        )
    return None


def _absent(path: Path, text: str, siblings: Callable[[Path], list[str]]) -> str:
    if path.suffix == ".gguf":
        return f"there is no file '{text}'"
    message = f"there is no directory '{text}'"
    if re.fullmatch(f"{_PART}/{_PART}", text):
        return f"{message}; for a model of the Hugging Face hub write {_HUB}{text}"
    hint = did_you_mean(path.name, siblings(path.parent))
    return f"{message}; {hint}" if hint.startswith("did") else message


def _directories(parent: Path) -> list[str]:
    try:
        return [item.name for item in os.scandir(parent) if item.is_dir()]
    except OSError:
        return []
