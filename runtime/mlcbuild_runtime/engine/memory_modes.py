"""Decides how much memory, and which batch size and prefill chunk, serving a bundle uses: by a mode
(interactive, local or server), unless the command line states a number.
"""

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
    """The share of a machine's memory, the batch size and the number of prompt tokens computed at a time that
    one memory mode uses."""

    about: str
    memory: int
    """Percentage (0 to 100) of the machine's or container's memory that all loaded bundles together may use.
    """
    max_batch: int | None
    """Maximum requests in a batch; None means the limit of the bundle's library."""
    prefill_chunk: int | None
    """Maximum prompt tokens computed at a time, for which other requests wait; None means the limit of the
    bundle's library."""


MODES: Mapping[Mode, Share] = {
    "interactive": Share("one request at a time, and the machine is used for other things", 50, 1, None),
    "local": Share("a few requests at a time, and the machine is used for other things", 50, 4, 256),
    "server": Share("as much as the machine has room for", 90, None, 256),
}


@dataclass(frozen=True)
class LimitOverrides:
    """The limits of memory, batch size, KV cache pages and prefill chunk (prompt tokens computed between two
    decode steps) that the command line states for serving a bundle. None: the memory mode (interactive, local
    or server) decides."""

    mode: Mode = "server"
    memory: int | None = None
    """Maximum number of bytes of memory that all loaded bundles together may use, as the command line states
    it; None: the share of the machine's memory that the memory mode sets."""
    max_batch: int | None = None
    max_pages: int | None = None
    prefill_chunk: int | None = None

    @property
    def budget(self) -> int:
        """Returns the bytes of memory that all loaded bundles together may use: those that the command line
        states, else the memory mode's share of the machine's or container's memory."""
        return self.memory or machine_memory.available() * MODES[self.mode].memory // 100


@dataclass(frozen=True)
class ChosenLimits:
    """The limits (pages, batch size, prefill chunk, memory) that were chosen for serving a bundle."""

    mode: Mode
    max_batch: int
    pages: int
    """Number of pages of the KV cache."""
    prefill_chunk: int
    memory: int
    """Number of bytes of memory that weights, KV cache and workspace need together with these limits."""


def choose(requested: LimitOverrides, manifest: Manifest) -> ChosenLimits:
    """Returns the limits with which a bundle is served. The KV cache gets the memory that weights and
    workspace leave, at most a full context for each request of a batch and at least one full context. Numbers
    that the command line states replace these, and the library's limits bound them all. Raises SetupError if
    the bundle does not fit a memory limit that the command line states; the memory mode's share may be
    exceeded."""
    share, limits, needs = MODES[requested.mode], manifest.limits, manifest.memory
    each = limits.sequence_pages
    max_batch = min(requested.max_batch or share.max_batch or limits.max_batch, limits.max_batch)
    page = max(1, needs.kv_cache // limits.pages)
    room = (requested.budget - needs.weights - needs.workspace) // page
    pages = requested.max_pages or max(each, min(each * max_batch, room))
    pages = min(pages, limits.pages)
    needed = needs.weights + needs.workspace + pages * page
    if requested.memory is not None and needed > requested.memory:
        raise SetupError(
            f"{manifest.name} needs {sizes.show(needed)} (weights {sizes.show(needs.weights)}, workspace"
            f" {sizes.show(needs.workspace)}, {pages} pages of KV cache {sizes.show(pages * page)}),"
            f" but the memory for bundles is {sizes.show(requested.memory)}: give it more, or --max-pages"
        )
    chunk = min(requested.prefill_chunk or share.prefill_chunk or limits.prefill_chunk, limits.prefill_chunk)
    return ChosenLimits(requested.mode, max_batch, pages, chunk, needed)
