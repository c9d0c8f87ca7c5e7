"""The `cache` section: remotes to share results through."""

from __future__ import annotations

from typing import cast
from urllib.parse import urlsplit

from mlcbuild.documents.document import Where
from mlcbuild.recipe.reading import Reading
from mlcbuild.remotes import Mode, Remote, fault


def read_remotes(reading: Reading) -> tuple[Remote, ...]:
    """The remotes, in order; wrong ones are reported."""
    found: list[Remote] = []
    for index in range(len(reading.items("cache", "remotes"))):
        where: Where = ("cache", "remotes", index)
        remote = _read(reading, where)
        if remote is None:
            continue
        if remote.url in (other.url for other in found):
            reading.report((*where, "url"), f"{remote.url} is named twice")
        found.append(remote)
    return tuple(found)


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
    return Remote(urlsplit(url).geturl().rstrip("/"), mode, ci_only, tuple(trust))
