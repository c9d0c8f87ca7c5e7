"""Leaves a receipt of a run that ended well: all that it read, and all that its result stands on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlcbuild_runtime

import mlcbuild
from mlcbuild import keyfile, receipt, runlog, targets
from mlcbuild.compiler.toolchain import programs
from mlcbuild.events import RunResult
from mlcbuild.graph import Source
from mlcbuild.links import STAMP
from mlcbuild.pipeline import Pipeline
from mlcbuild.recipe import LocalSource
from mlcbuild.runlog import LoggedStep, RunLog
from mlcbuild.statcache import RACY_NS
from mlcbuild.store import Store


@dataclass(frozen=True)
class Settled:
    """A run after which nothing is left to do."""

    pipeline: Pipeline
    store: Store
    result: RunResult
    log: RunLog


@dataclass(frozen=True)
class Said:
    """What a run without work says."""

    lines: tuple[str, ...]
    places: str
    """The end of its last line."""


class _DoubtError(Exception):
    """Something is too young to be told from its next state, or not as it should be: no receipt this time."""


def leave(run: Settled, said: Said, bundles: Iterable[Path], words: Sequence[str], began: int) -> None:
    """Writes the receipt of the command line `words`, if everything in it can be vouched for.

    The run read nothing before `began`, in nanoseconds since 1970.
    """
    if sys.platform == "darwin":
        return  # its `clang` is a stub: which linker it starts shows in no file of ours
    with suppress(OSError, _DoubtError):
        read = list(dict.fromkeys(_read(run.pipeline, run.store)))
        watched = [path for path in read if os.path.lexists(path)]
        absent = [path for path in read if not os.path.lexists(path)]
        for path, changed in zip(watched, _changes(watched), strict=True):
            if changed + RACY_NS >= began:
                raise _DoubtError(path)
        blobs = _Blobs(run.store)
        records = {step.record.key: step.record for step in run.result.steps if step.record is not None}
        for record in records.values():
            for _, digest, size in record.rows:
                blobs.add(f"{digest[:2]}/{digest}", size)
        listed: list[str] = []
        for output in bundles:
            watched += _output(output, blobs, listed)
        # Beside bundles lie the lists of what was written into them: new ones replace old ones by name.
        for parent in {str(output.parent) for output in bundles}:
            watched += _directory(parent, listed)
        kept, rest = runlog.keep_rest(run.store, run.pipeline.recipe.path, _without_work(run.log))
        watched.append(str(kept))
        receipt.write(
            receipt.place(str(run.store.root), words),
            {
                "said": _said(said, len(run.result.steps)),
                "watched": watched,
                "stats": list(map(str, receipt.stats(watched))),
                "absent": absent,
                "records": sorted(records),
                "blobs": list(blobs.sizes),
                "sizes": list(map(str, blobs.sizes.values())),
                "listed": listed,
                "log": [str(kept.parent), rest],
            },
        )


def _read(pipeline: Pipeline, store: Store) -> Iterator[str]:
    """Every path whose content, or absence, decided what the run was to do."""
    recipe = pipeline.recipe
    yield from map(
        str, (recipe.path.absolute(), recipe.lock, keyfile.default_path(), store.root / "store.json")
    )
    yield from (
        str(item.source.path) for item in recipe.models.values() if isinstance(item.source, LocalSource)
    )
    for node in pipeline.graph.nodes.values():
        if isinstance(node, Source):
            yield from (str(node.root / name) for name in node.files)
    for place in (*mlcbuild.__path__, *mlcbuild_runtime.__path__, str(targets.directory())):
        yield from _files(place)
    # What is installed: names of directories in there hold versions.
    yield from (path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
    linkers = {name for target in recipe.targets.values() for name in programs(target)}
    for directory in os.get_exec_path():
        yield from (os.path.join(directory, name) for name in sorted(linkers))


def _files(place: str) -> Iterator[str]:
    for directory, names, files in os.walk(place):
        names[:] = sorted(name for name in names if name != "__pycache__")
        yield from (os.path.join(directory, name) for name in sorted(files))


def _changes(paths: Sequence[str]) -> list[int]:
    """The later of mtime and ctime of each."""
    found = receipt.stats(paths)
    return [max(pair) for pair in zip(found[1::3], found[2::3], strict=True)]


@dataclass
class _Blobs:
    """Files with the store's mtime, by path below cas/, or absolute for copies elsewhere."""

    store: Store
    sizes: dict[str, int] = field(default_factory=dict)
    places: set[tuple[int, int]] = field(default_factory=set)
    """(device, inode) of each."""

    def add(self, name: str, size: int | None) -> None:
        found = os.stat(os.path.join(self.store.root, "cas", name))
        if found.st_mtime_ns != STAMP * 10**9 or size not in (None, found.st_size):
            raise _DoubtError(name)
        self.sizes[name] = found.st_size
        self.places.add((found.st_dev, found.st_ino))


def _output(output: Path, blobs: _Blobs, listed: list[str]) -> Iterator[str]:
    """The directories of a bundle that was just put in place, or found there: those to watch.

    Their files are blobs of the store already, or are added to them.
    """
    if output.is_symlink():
        raise _DoubtError(output)
    for directory, _, _ in os.walk(output):
        device = os.stat(directory).st_dev
        yield from _directory(directory, listed)
        for entry in os.scandir(directory):
            if not entry.is_dir(follow_symlinks=False) and (device, entry.inode()) not in blobs.places:
                blobs.add(entry.path, None)


def _directory(directory: str, listed: list[str]) -> Iterator[str]:
    """The directory, if its stat says whether a name in it comes, goes or changes; one that is too young for
    that is listed instead.
    """
    found = os.stat(directory)
    if max(found.st_mtime_ns, found.st_ctime_ns) + RACY_NS < time.time_ns():
        yield directory
    else:
        names = receipt.inodes(directory)
        listed += [directory, str(len(names) // 2), *names]


def _without_work(log: RunLog) -> RunLog:
    """The log of a run that finds everything done."""

    def reused(step: LoggedStep) -> LoggedStep:
        return replace(step, status="reused", words="", start=None, seconds=0.0, tail="", worker="")

    variants = tuple(replace(item, status="reused") for item in log.variants)
    return replace(log, steps=tuple(map(reused, log.steps)), variants=variants)


def _said(said: Said, steps: int) -> list[str]:
    """The text before and behind the seconds that a run took."""
    return ["\n".join([*said.lines, f"0 built, {steps} reused in "]), said.places]
