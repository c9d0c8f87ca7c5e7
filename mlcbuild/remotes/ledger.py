"""Stores, for each remote cache, the keys of the step results that it has received from this store, so that
the next run uploads everything to a new remote cache.

The file `sent/<digest of the remote's URL>` of a store has one key per line. It only saves requests: without
it, uploads query the remote for every file. A remote that was emptied is filled by `mlcbuild cache push`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from mlcbuild_format import regular

from mlcbuild.canon import bytes_digest

DIRECTORY = "sent"
"""Name of the directory in a store whose files list, for each remote cache, the keys of the results that it
has received."""
_LARGEST = 64 << 20
"""Largest size in bytes that is read of a file with the keys that a remote cache has received, which suffices
for a million keys. A larger one counts as empty."""


class Ledger:
    """The keys of those step results of a store that one remote cache has already received. `add` is
    thread-safe."""

    def __init__(self, store: Path, remote: str) -> None:
        self._path = store / DIRECTORY / bytes_digest(remote.encode())[:32]
        self._added: set[str] = set()

    @cached_property
    def keys(self) -> frozenset[str]:
        """Returns the keys of the results that a remote cache had received when the store's list of them was
        first read, without those that were added later; a missing or unreadable list counts as empty."""
        try:
            return frozenset(regular.read(self._path, _LARGEST, follow_link=False).decode().split("\n"))
        except (OSError, ValueError):
            return frozenset()

    def add(self, key: str) -> None:
        """Adds a key to the list, in the store, of the step results that one remote cache has received,
        unless it is listed. Does nothing in a store that cannot be written."""
        if key in self._added or key in self.keys:
            return
        self._added.add(key)
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(self._path, flags, 0o644)
            try:
                os.write(file, f"{key}\n".encode())
            finally:
                os.close(file)
