"""Writes the receipt of a successful run, a list by which a later run sees that nothing has changed:
everything that the run read, and everything on which its result depends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlcbuild_format

import mlcbuild
from mlcbuild import canon, keyfile
from mlcbuild.build.graph import Graph, Source
from mlcbuild.build.plan import step_modules
from mlcbuild.compiler.cpu.toolchain import programs
from mlcbuild.outcomes import Result
from mlcbuild.pipeline import Pipeline
from mlcbuild.recipe import LocalSource
from mlcbuild.reports import runlog
from mlcbuild.reports.report import counts
from mlcbuild.reports.runlog import LoggedStep, RunLog
from mlcbuild.session import Session
from mlcbuild.store import receipt
from mlcbuild.store.layout import is_as_written, shelved
from mlcbuild.store.stamp import is_racy
from mlcbuild.store.store import Store
from mlcbuild.targets import presets


@dataclass(frozen=True)
class Printed:
    """The texts that a later run of the same command line prints if nothing has changed, so that it has no
    work: the lines for variants and their speeds, and the end of the last line."""

    lines: tuple[str, ...]
    places: str
    """The end of the last line that a run prints, after its duration: the number of finished bundles and
    their directories."""


class _DoubtError(Exception):
    """The error raised when no receipt may be written. A receipt assures later runs that nothing has changed,
    but here it could hide a change: an input's mtime is too recent, or a file is not in the state that the
    run left.
    """


def leave(session: Session, result: Result, printed: Printed, words: Sequence[str], began: int) -> None:
    """Writes a receipt for a command line to the store, by which a later run sees that nothing has changed
    and ends at once. It writes none, without an error, on macOS, if a file cannot be read or is not as the
    run left it, or if an input changed so recently that a later change may not show in its mtime.

    words: the command line. result: outcome of a run after which nothing is left to do. printed: texts that
    the later run prints. began: start of the run in nanoseconds since 1970, before which it read nothing."""
    if sys.platform == "darwin":
        return  # Apple's `clang` is a wrapper: no file shows which linker it starts.
    looked, store = time.time_ns(), session.store
    with suppress(OSError, _DoubtError):
        read = list(dict.fromkeys(_read(session.pipeline, store)))
        watched = [path for path in read if os.path.lexists(path)]
        absent = [path for path in read if not os.path.lexists(path)]
        _demand_old(watched, began)
        blobs = _Blobs(store)
        records = {step.record.key: step.record for step in result.steps if step.record is not None}
        for record in records.values():
            for _, digest, size in record.rows:
                blobs.add(digest, size)
        listed: list[str] = []
        watched += _outputs(result.bundles.values(), blobs, listed, looked)
        _demand_old(watched, max(looked, began))
        log = _without_work(result.log)
        kept_path, rest = runlog.keep_rest(store, session.recipe.path, log)
        watched.append(str(kept_path))
        shelves = _shelves(store, records, looked)
        texts = {
            "said": _texts(printed, log),
            "watched": map(receipt.short, watched),
            "absent": absent,
            "records": records,
            "shelves": shelves,
            "blobs": blobs.blobs,
            "copies": map(receipt.short, blobs.copies),
            "listed": listed,
            "log": [str(kept_path.parent), rest],
        }
        numbers = {
            "stats": receipt.stats(watched),
            "shelf_stats": [number for stat in shelves.values() for number in stat],
            "blob_sizes": list(blobs.blobs.values()),
            "copy_sizes": list(blobs.copies.values()),
        }
        receipt.write(receipt.place(str(store.root), words), texts, numbers)


def _outputs(outputs: Collection[Path], blobs: _Blobs, listed: list[str], looked: int) -> Iterator[str]:
    """Yields the paths of those directories of bundles, and of their parents, whose mtime is old enough to
    change with any later change of the names in them. For each other directory, appends to `listed` its path,
    its number of entries, and the name and inode of each. Adds to `blobs`, which must already hold the
    store's files of this run, the sizes of the bundles' files that are no hard links to these. outputs: the
    bundles' directories; looked: time of the check, in ns since 1970. Raises _DoubtError if a bundle is a
    symbolic link or the mtime of a file shows a change since the run wrote it, OSError if a file or directory
    is missing or unreadable."""
    for output in outputs:
        yield from _output(output, blobs, listed, looked)
    # The lists of written files beside bundles are replaced by rename, which changes the parent directory.
    for parent in {str(output.parent) for output in outputs}:
        yield from _directory(parent, listed, looked)


def _read(pipeline: Pipeline, store: Store) -> Iterator[str]:
    """Yields every path whose contents, or whose absence, determine the result of a run of the recipe:
    recipe, sources, program files, linkers.
    """
    recipe = pipeline.recipe
    files = (recipe.path.absolute(), recipe.lock, keyfile.default_path(), store.root / "store.json")
    yield from map(str, filter(None, files))
    yield from (
        str(source.path)
        for item in recipe.models.values()
        for source in item.sources
        if isinstance(source, LocalSource)
    )
    for node in pipeline.graph.nodes.values():
        if isinstance(node, Source):
            yield from (str(node.root / name) for name in node.files)
    yield from _code(pipeline.graph, store)
    yield from _data()
    # Installed packages: the names of directories there include versions.
    yield from (path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
    linkers = {name for target in recipe.targets.values() for name in programs(target)}
    for directory in os.get_exec_path():
        yield from (os.path.join(directory, name) for name in sorted(linkers))


def _code(graph: Graph, store: Store) -> Iterator[str]:
    """Yields the paths of the program's source files on which a run of the build graph `graph` depends, and
    their directories. These files are the modules that this process has loaded, and those that are hashed
    into the cache keys of the steps.

    No other files matter: a run without work would load another module only after an edit of one of these
    files, or after a new file in one of the directories has replaced a module."""
    closures: canon.SourceFiles = {}
    for modules in dict.fromkeys(step_modules(step) for step in graph.steps()):
        canon.code_files(*modules, files=closures, imports=store.cache.imports())
    packages = {*canon.PACKAGES, *(name.partition(".")[0] for name in closures)}
    loaded = {name for name in sys.modules if name.partition(".")[0] in packages}
    # `python -m mlcbuild` loads this one under another name.
    names = {"mlcbuild.__main__", *loaded, *closures}
    files = sorted(str(path) for path in map(canon.module_path, names) if path is not None)
    yield from dict.fromkeys(map(os.path.dirname, files))
    yield from files


def _data() -> Iterator[str]:
    """Yields the paths of the program's files that are not Python source, such as schemas and presets of
    targets, and the directory of these presets. It leaves out those of the runtime, which only servers read.
    """
    yield str(presets.directory())
    for place in (*mlcbuild.__path__, *mlcbuild_format.__path__, str(presets.directory())):
        for directory, names, files in os.walk(place):
            names[:] = sorted(name for name in names if name != "__pycache__")
            yield from (os.path.join(directory, name) for name in sorted(files) if not name.endswith(".py"))


def _demand_old(paths: Sequence[str], read_ns: int) -> None:
    """Raises _DoubtError if one of the paths was changed later than 2 s before the time `read_ns`, at which
    its contents may have been read (nanoseconds since 1970): a later change may then not show in its mtime.
    """
    if is_racy(_latest(receipt.stats(paths)), read_ns):
        raise _DoubtError("too recent")


def _latest(stats: Sequence[int]) -> int:
    """Returns the latest of all mtimes and ctimes in a flat list of stats, three numbers for each path
    (inode, mtime, ctime), in nanoseconds; 0 for an empty list."""
    return max(max(stats[1::3], default=0), max(stats[2::3], default=0))


@dataclass
class _Blobs:
    """Collects the sizes of files in a store and of other files in bundles, by which a later run sees that
    none has changed. Raises _DoubtError for a file, also in a bundle, without the mtime that the store gives
    its files (1980-01-01), and for one in the store that has not the expected size; OSError if a file is
    missing."""

    store: Store
    blobs: dict[str, int] = field(default_factory=dict)
    """Sizes of the store's files on which the run's result depends: path relative to the store's directory
    cas/ -> size in bytes."""
    copies: dict[str, int] = field(default_factory=dict)
    """Absolute path -> size in bytes, for files in bundles that are not among the stored files of any build
    step's result.
    """
    places: set[tuple[int, int]] = field(default_factory=set)
    """(device, inode) of each file recorded so far. Another path with the same pair is a hard link to a
    recorded file.
    """

    def add(self, digest: str, size: int) -> None:
        name = shelved(digest)
        if name not in self.blobs:
            self.blobs[name] = self._look(str(self.store.blob(digest)))
        if self.blobs[name] != size:
            raise _DoubtError(digest)

    def copy(self, path: str) -> None:
        self.copies[path] = self._look(path)

    def _look(self, path: str) -> int:
        stat_result = os.stat(path)
        if not is_as_written(stat_result, stat_result.st_size):
            raise _DoubtError(path)
        self.places.add((stat_result.st_dev, stat_result.st_ino))
        return stat_result.st_size


def _output(output: Path, blobs: _Blobs, listed: list[str], looked: int) -> Iterator[str]:
    """Yields those directories of one bundle whose mtime is old enough to change with any later change of the
    names in them. For each other directory, appends to `listed` its path, its number of entries, and the name
    and inode of each. Adds to `blobs` the sizes of the bundle's files, except hard links to the store's files
    that `blobs` already holds. output: the bundle's directory; looked: time of the check, in ns since 1970.
    Raises _DoubtError if `output` is a symbolic link, or if the mtime of a file shows a change since the run
    wrote it."""
    if output.is_symlink():
        raise _DoubtError(output)
    for directory, _, _ in os.walk(output):
        device = os.stat(directory).st_dev
        yield from _directory(directory, listed, looked)
        for entry in os.scandir(directory):
            if not entry.is_dir(follow_symlinks=False) and (device, entry.inode()) not in blobs.places:
                blobs.copy(entry.path)


def _directory(directory: str, listed: list[str], looked: int) -> Iterator[str]:
    """Yields `directory` if its mtime and ctime are more than 2 s before `looked`, so that any later change
    of the names in it changes the mtime. Otherwise yields nothing, and appends to `listed` the directory, the
    number of its entries, and the name and inode of each, which a later run compares with the directory.
    looked: time of the check, in ns since 1970."""
    if not is_racy(_latest(receipt.stats([directory])), looked):
        yield directory
    else:
        names = receipt.inodes(directory)
        listed += [directory, str(len(names) // 2), *names]


def _shelves(store: Store, records: Iterable[str], looked: int) -> dict[str, list[int]]:
    """Returns directory of step records in the store (its name, two hex digits) -> [inode, mtime, ctime],
    with times in ns; zeros if one is too recent to detect a later change. records: keys of the records in
    question; looked: time of the check, in ns since 1970. Raises _DoubtError if a record no longer exists,
    OSError if its directory does not."""
    stats = {}
    directories: set[str] = set()
    for shelf in sorted({key[:2] for key in records}):
        place = f"{store.root}/ac/{shelf}"
        stats_of_shelf = receipt.stats([place])
        stats[shelf] = [0, 0, 0] if is_racy(_latest(stats_of_shelf), looked) else stats_of_shelf
        directories.update(os.listdir(place))
    if not directories.issuperset(records):
        raise _DoubtError("a record went meanwhile")
    return stats


def _without_work(log: RunLog) -> RunLog:
    """Returns the log that a run would have written if it had reused the results of all build steps. log:
    that of the real run.
    """

    def reused(step: LoggedStep) -> LoggedStep:
        return replace(step, status="reused", words="", start=None, seconds=0.0, tail="", worker="")

    variants = tuple(replace(item, status="reused") for item in log.variants)
    return replace(log, steps=tuple(map(reused, log.steps)), variants=variants)


def _texts(printed: Printed, log: RunLog) -> list[str]:
    """Returns, as two texts, what a run with the log `log` prints before its duration and what it prints
    after it. printed: the parts of this output that do not depend on the log.
    """
    return ["\n".join([*printed.lines, f"{counts(log)} in "]), printed.places]
