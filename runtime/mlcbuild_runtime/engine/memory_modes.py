"""How much of a machine a bundle may take: three modes, and what explicit numbers change of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlcbuild_format import memory as machine_memory
from mlcbuild_format import sizes
from mlcbuild_format.bundle import Manifest
from mlcbuild_format.errors import SetupError

Mode = Literal["interactive", "local", "server"]


@dataclass(frozen=True)
class Share:
    about: str
    memory: int
    """Percent of the machine's memory, or of the container's, that all bundles together may take."""
    max_batch: int | None
    """Requests at a time; None: the library's limit."""
    prefill_chunk: int | None
    """Tokens of prompts at a time: others wait for so many; None: the library's limit."""


MODES: Mapping[Mode, Share] = {
    "interactive": Share("one request at a time, and the machine is used for other things", 50, 1, None),
    "local": Share("a few requests at a time, and the machine is used for other things", 50, 4, 256),
    "server": Share("as much as the machine has room for", 90, None, 256),
}


@dataclass(frozen=True)
class Wanted:
    """What a command line says; None: as the mode has it."""

    mode: Mode = "server"
    memory: int | None = None
    """Bytes for all bundles together."""
    max_batch: int | None = None
    max_pages: int | None = None
    prefill_chunk: int | None = None

    @property
    def budget(self) -> int:
        """Bytes for all bundles together."""
        return self.memory or machine_memory.available() * MODES[self.mode].memory // 100


@dataclass(frozen=True)
class Chosen:
    """What a bundle runs with."""

    mode: Mode
    max_batch: int
    pages: int
    """Of the KV cache."""
    prefill_chunk: int
    memory: int
    """Bytes: weights, KV cache and workspace."""


def choose(wanted: Wanted, manifest: Manifest) -> Chosen:
    """What `manifest`'s bundle is to run with. The KV cache gets the room that is left, up to a full context
    for every request, and at least one. Raises SetupError when it does not fit the memory that was given."""
    share, limits, needs = MODES[wanted.mode], manifest.limits, manifest.memory
    each = limits.sequence_pages
    max_batch = min(wanted.max_batch or share.max_batch or limits.max_batch, limits.max_batch)
    page = max(1, needs.kv_cache // limits.pages)
    room = (wanted.budget - needs.weights - needs.workspace) // page
    pages = wanted.max_pages or max(each, min(each * max_batch, room))
    pages = min(pages, limits.pages)
    needed = needs.weights + needs.workspace + pages * page
    if wanted.memory is not None and needed > wanted.memory:
        raise SetupError(
            f"{manifest.name} needs {sizes.show(needed)} (weights {sizes.show(needs.weights)}, workspace"
            f" {sizes.show(needs.workspace)}, {pages} pages of KV cache {sizes.show(pages * page)}),"
            f" but the memory for bundles is {sizes.show(wanted.memory)}: give it more, or --max-pages"
        )
    chunk = min(wanted.prefill_chunk or share.prefill_chunk or limits.prefill_chunk, limits.prefill_chunk)
    return Chosen(wanted.mode, max_batch, pages, chunk, needed)
