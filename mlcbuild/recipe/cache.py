"""Reads the `cache` section of a recipe: the remote caches through which results are shared."""

from __future__ import annotations

from typing import cast

from mlcbuild.documents.document import Where
from mlcbuild.recipe.reading import Reading
from mlcbuild.remotes import Mode, Remote, fault, normal


def read_remotes(reading: Reading) -> tuple[Remote, ...]:
    """Reads the `cache` section of a recipe, and returns its valid remote caches (address, mode, trusted
    keys), in order. For each of the others a problem is added to the recipe's list, and also for one with the
    address of an earlier one or with `write: ci-only` and `mode: read`, although these are in the result.
    reading: the recipe's data and its problems."""
    remotes: list[Remote] = []
    for index in range(len(reading.items("cache", "remotes"))):
        where: Where = ("cache", "remotes", index)
        remote = _read(reading, where)
        if remote is None:
            continue
        if remote.url in (other.url for other in remotes):
            reading.report((*where, "url"), f"{remote.url} is named twice")
        remotes.append(remote)
    return tuple(remotes)


def _read(reading: Reading, where: Where) -> Remote | None:
    url = reading.text(*where, "url")
    if url is None:
        return None
    if problem := fault(url):
        reading.report((*where, "url"), problem)
        return None
    mode = cast(Mode, reading.text(*where, "mode") or "readwrite")
    ci_only = reading.text(*where, "write") == "ci-only"
    if ci_only and mode == "read":
        reading.report((*where, "write"), "'write' says when results are sent, but 'mode: read' sends none")
    trust = [item for item in reading.items(*where, "trust") if isinstance(item, str)]
    return Remote(normal(url), mode, ci_only, tuple(trust))
