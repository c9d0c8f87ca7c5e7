"""Compares numbers of download threads by downloading from a local server that delays each answer by 20 ms,
as a distant one would.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from mlcbuild.canon import Entry
from mlcbuild.remotes import Remote
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.store import Store
from tests.caches import Handler, serving

FILES, LATENCY = 48, 0.02
CONSTANTS = {"transfer._DOWNLOADS": (1, 2, 8, 16)}
"""Constant in mlcbuild/build, as "module.NAME" -> the numbers of download threads whose duration is compared
with that of its present value."""


def compare(counts: Sequence[int], rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Compares numbers of download threads. Yields (label with the size of each of 48 files, list with one
    entry for each number in `counts`: the least seconds, over all rounds, in which so many threads download
    all files). The time is mostly a delay of 20 ms that the server adds to each answer, so that other work on
    the machine has little effect. Raises SystemExit if a download fails."""

    def distant(handler: Handler) -> bool:
        time.sleep(LATENCY)
        return False

    for size in (10_000, 1_000_000):
        blobs = [os.urandom(size) for _ in range(FILES)]
        entries = [Entry(str(i), blake3(data).hexdigest(), size) for i, data in enumerate(blobs)]
        with serving(distant) as cache:
            cache.content = {f"/cas/{entry.digest}": data for entry, data in zip(entries, blobs, strict=True)}
            least = [float("inf")] * len(counts)
            for _ in range(rounds):
                for index, count in enumerate(counts):
                    least[index] = min(least[index], _download(cache.url, entries, count))
        yield f"{FILES} files of {size / 1e6:g} MB", least


def _download(url: str, entries: Sequence[Entry], count: int) -> float:
    with tempfile.TemporaryDirectory() as area:
        store = Store(Path(area))
        sharing = Sharing(store, [Link(Remote(url))])
        with store.staging(), ThreadPoolExecutor(count) as pool:
            begun = time.monotonic()
            calls = [
                pool.submit(sharing.fetch, entry, threading.Event(), lambda _: None) for entry in entries
            ]
            failures = [why for call in calls if (why := call.result())]
            spent = time.monotonic() - begun
        sharing.close()
    if failures:
        raise SystemExit(failures[0])
    return spent
