"""Computes what a run would do with each build step, and for what reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, TypeAlias

from mlcbuild.build.changes import Change, compare, summary
from mlcbuild.build.events import Reporter, SourceRead, Warned, silent
from mlcbuild.build.graph import Graph, Input, Source, Step, selected
from mlcbuild.canon import (
    Entry,
    SourceFiles,
    Tree,
    canonical,
    canonical_plain,
    code_files,
    module_path,
    salt,
    step_key,
    tree_digest,
)
from mlcbuild.errors import SourceError, UsageError
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.records import Expected, Preimage, Record
from mlcbuild.store.statcache import StatCache
from mlcbuild.store.store import Store

State: TypeAlias = Literal["hit", "remote", "run", "pending"]

_LARGE = 256 << 20
"""Size in bytes from which on the hashing of a source file is reported to the user."""


@dataclass(frozen=True)
class Planned:
    """The plan for one build step: its cache key, and whether and why a run must execute it."""

    name: str
    state: State
    key: str | None
    """The cache key of the build step, in hex; None while an input of the step has not been built yet."""
    reason: str
    """The reason why the step must run or its result must be downloaded, in words; "" if its result is in the
    store.
    """
    record: Record | None = None
    """The record of the build step's result in the store or on a remote cache; for a step that must run, the
    latest record of a step with this name, for estimates.
    """
    origin: str = ""
    """URL of the remote cache that has the record of the step's result; "" if the result is in the store or
    must be built. The result's files are downloaded only when something reads them.
    """


@dataclass(frozen=True)
class Plan:
    """The plan of a run: for every build step, in order, whether its result exists or the run must fetch or
    build it.
    """

    steps: tuple[Planned, ...]
    reads_remotes: bool = True
    """True if the run can download the files of the steps in state "remote"; False if it reads no remote
    cache and knows their results from an earlier run.
    """

    def __getitem__(self, name: str) -> Planned:
        return self.by_name[name]

    @cached_property
    def by_name(self) -> Mapping[str, Planned]:
        return {step.name: step for step in self.steps}

    def count(self, state: State) -> int:
        return sum(step.state == state for step in self.steps)


def plan(
    graph: Graph,
    store: Store,
    *,
    force: Iterable[str] = (),
    only: Iterable[str] = (),
    sharing: Sharing | None = None,
    report: Reporter = silent,
) -> Plan:
    """Returns the plan of a run: for each step, whether its result exists and why it must run otherwise.

    force: names or globs of steps to run even if their results exist; only: names or globs of the steps to
    build. Reads sources (through a cache of files' modification times) and step records, and writes nothing
    but that cache. Raises UsageError for a name that matches no step, SourceError for an unreadable source,
    and StoreError when the store cannot be read. Problems of remote caches are reported as warnings.
    """
    forced, selected_steps = graph.match(force), graph.match(only)
    planner = Planner(graph, store, force=forced, only=selected_steps, sharing=sharing, report=report)
    planned = Plan(tuple(planner.all()), planner.sharing.reads)
    for sentence in planner.sharing.take_warnings():
        report(Warned(sentence))
    store.cache.save()
    return planned


class Planner:
    """Plans one step at a time, from the results of the steps on which it depends.

    A run plans a step again as soon as all of its inputs have been built, so that a step whose inputs were
    rebuilt with the same contents becomes a cache hit (early cut-off).
    """

    def __init__(
        self,
        graph: Graph,
        store: Store,
        *,
        force: frozenset[str] = frozenset(),
        only: frozenset[str] = frozenset(),
        sharing: Sharing | None = None,
        report: Reporter = silent,
    ) -> None:
        self.graph = graph
        self.store = store
        self.sharing = sharing or Sharing(store)
        self.force = force
        names = graph.closure(only) if only else graph.nodes
        self.steps = [step for step in graph.steps() if step.name in names]
        self.results: dict[str, Record | Tree] = {}
        """The files of sources and the results of steps, in one mapping: name of a directory of source files
        -> its files with their digests (a `Tree`); name of a step -> the record of its result. A step without
        an available result has no entry."""
        self.stats: dict[str, dict[str, tuple[int, int]]] = {}
        """Name of a directory of source files -> file -> (size in bytes, mtime in ns) at the time
        of hashing.
        """
        self._report = report
        self._code = _Code(store.cache)
        self._rows_texts: dict[str, bytes] = {}
        """Digest of a tree of files -> the list of its files, [path, digest, size] each, as canonical
        JSON."""
        self._selections: dict[tuple[str, tuple[str, ...]], Tree] = {}
        problems = []
        for node in graph.nodes.values():
            if isinstance(node, Source) and node.name in names:
                problems += self._read(node)
        if problems:
            raise SourceError("\n".join(problems))

    def all(self) -> Iterator[Planned]:
        """Yields the plan of every step of the graph, in the graph's order."""
        plans: dict[str, Planned] = {}
        for wave in [self.steps] if self.sharing.empty else self._waves():
            if not self.sharing.empty:
                self.sharing.look_up(self._unknown(wave))
            for step in wave:
                planned = plans[step.name] = self.consider(step)
                if planned.state in ("hit", "remote") and planned.record is not None:
                    self.results[step.name] = planned.record
        return (plans[step.name] for step in self.steps)

    def _waves(self) -> list[list[Step]]:
        """Returns the build steps grouped by depth, the length of the longest chain of steps on which a step
        depends, so that remote caches can be queried for all step records of a group at once.
        """
        depths: dict[str, int] = {}
        waves: list[list[Step]] = []
        for step in self.steps:
            depth = max((depths[need] + 1 for need in self.graph.needs(step) if need in depths), default=0)
            depths[step.name] = depth
            if depth == len(waves):
                waves.append([])
            waves[depth].append(step)
        return waves

    def _unknown(self, steps: Iterable[Step]) -> Iterator[str]:
        """Yields the cache keys of those of `steps` whose step records are not in the store and may be on a
        remote cache.
        """
        for step in steps:
            if step.shared and all(need in self.results for need in self.graph.needs(step)):
                key = self.key(step)
                if self.store.record(key) is None:
                    yield key

    def consider(self, step: Step) -> Planned:
        """Returns the plan of one step (Planned): its cache key, whether its result is in the store, on a
        remote cache or must be built, and why. The state is "pending", without a key, while the attribute
        `results` lacks the result of one of the step's inputs.
        """
        waits = [name for name in self.graph.needs(step) if name not in self.results]
        if waits:
            more = f" and {len(waits) - 1} more" if len(waits) > 1 else ""
            return Planned(step.name, "pending", None, f"waits for {waits[0]}{more}", self._latest(step))
        key = self.key(step)
        record = self.store.record(key, partial(self._expected, step))
        if step.name in self.force:
            return Planned(step.name, "run", key, "forced", record or self._latest(step))
        lost = self.store.lost(record) if record is not None else ""
        if record is not None and not lost:
            return Planned(step.name, "hit", key, "", record)
        if step.shared and (remote := self.sharing.find(key)) is not None:
            words = f"from {remote.origin}" + ("" if self.sharing.reads else ", which this run does not read")
            return Planned(step.name, "remote", key, words, remote.record, remote.origin)
        if record is None:
            return Planned(step.name, "run", key, *self._why(step, key))
        return Planned(step.name, "run", key, lost, record)

    def key(self, step: Step) -> str:
        """Returns the cache key of a step, in hex. The attribute `results` must hold the results of all
        inputs of the step. Raises UsageError if the module of its action does not exist.
        """
        inputs = {argument: self._digest(item) for argument, item in step.inputs.items()}
        return step_key(step.action, self.graph.params[step.name], self._code.salt(step)[0], inputs)

    def preimage(self, step: Step) -> Preimage:
        """Returns the pre-image of a step's cache key: everything that is hashed into the key. The attribute
        `results` must hold the results of all inputs of the step.
        """
        inputs = {argument: self.tree(item) for argument, item in step.inputs.items()}
        params = json.loads(self.graph.params[step.name])
        return Preimage(step.action, params, self._code.files(step), dict(step.tools), inputs)

    def _expected(self, step: Step) -> Expected:
        """Returns the texts that the record of a step's result must contain: action, code, inputs, parameters
        and tools as canonical JSON. A record in the store without them is not valid for the step."""
        _, code, tools = self._code.salt(step)
        inputs = {argument: self._rows(item) for argument, item in step.inputs.items()}
        return Expected.of(step.action, code, inputs, self.graph.params[step.name], tools)

    def _rows(self, item: Input) -> bytes:
        """Returns the files that a step's input selects as canonical JSON, in UTF-8: a list of [path, BLAKE3
        digest in hex, size in bytes], sorted by path.
        """
        tree = self.tree(item)
        if tree.digest not in self._rows_texts:
            rows = [(entry.path, entry.digest, entry.size) for entry in tree.files]
            self._rows_texts[tree.digest] = canonical_plain(rows)
        return self._rows_texts[tree.digest]

    def tree(self, item: Input) -> Tree:
        """Returns those files of a step or source directory that the globs of one input select, with their
        digests (a `Tree`).
        """
        result = self.results[self.graph.resolve(item.node)]
        if not item.select:
            return result if isinstance(result, Tree) else Tree(result.tree, result.files)
        place = (result.digest if isinstance(result, Tree) else result.tree, item.select)
        selection = self._selections.get(place)
        if selection is None:
            files = tuple(entry for entry in result.files if selected(entry.path, item.select))
            selection = self._selections[place] = Tree(tree_digest(files), files)
        return selection

    def explain(self, step: Step) -> tuple[Change, ...]:
        """Returns the differences between a step's cache key and the most similar key among the recent step
        records under the same name; () if there is no record.
        """
        image = self.preimage(step)
        key = image.key()
        recent = (self.store.record(old) for old in self.store.cache.keys(step.name) if old != key)
        candidates = []
        for old in recent:
            with suppress(ValueError):  # A record may be damaged in a part that only this comparison reads.
                if old is not None:
                    candidates.append(compare(old.info.preimage, image, step.display.labels))
        return min(candidates, key=len, default=())

    def _digest(self, item: Input) -> str:
        if item.select:
            return self.tree(item).digest
        result = self.results[self.graph.resolve(item.node)]
        return result.digest if isinstance(result, Tree) else result.tree

    def _latest(self, step: Step) -> Record | None:
        recent = (self.store.record(key) for key in self.store.cache.keys(step.name))
        return next((record for record in recent if record is not None), None)

    def _why(self, step: Step, key: str) -> tuple[str, Record | None]:
        latest = self._latest(step)
        if latest is None:
            gone = "its record is gone from the store" if self.store.cache.keys(step.name) else "never built"
            return gone, None
        if key in self.store.cache.keys(step.name) and key != latest.key:
            return "its record is gone from the store", latest
        return summary(self.explain(step)) or "its earlier record cannot be read", latest

    def _announce(self, path: Path, size: int) -> None:
        if size >= _LARGE:
            self._report(SourceRead(path, size))

    def _read(self, source: Source) -> list[str]:
        entries, problems = [], []
        stats = self.stats[source.name] = {}
        for name in source.files:
            try:
                digest, stat = self.store.cache.digest(source.root / name, self._announce)
            except OSError as error:
                problems.append(f"{source.name}: {source.root / name}: {error.strerror or error}")
                continue
            entries.append(Entry(name, digest, stat.st_size))
            stats[name] = (stat.st_size, stat.st_mtime_ns)
        self.results[source.name] = Tree.of(entries)
        return problems


class _Code:
    """The source files on which actions depend, with their digests. Each file is read once."""

    def __init__(self, cache: StatCache) -> None:
        self._cache = cache
        self._sources: SourceFiles = {}
        self._closures: dict[tuple[str, ...], dict[str, str]] = {}
        self._salts: dict[tuple[object, ...], tuple[str, bytes, bytes]] = {}

    def files(self, step: Step) -> dict[str, str]:
        """Returns path -> BLAKE3 digest for the source files of all modules that a step's action imports,
        statically or by name at run time. Raises UsageError for an unknown module.
        """
        modules = step_modules(step)
        if modules not in self._closures:
            for module in modules:
                if module_path(module) is None:
                    raise UsageError(
                        f"step {step.name}: there is no module '{module}' for its action {step.action}"
                    )
            imports = self._cache.imports()
            self._closures[modules] = code_files(*modules, files=self._sources, imports=imports)
        return self._closures[modules]

    def salt(self, step: Step) -> tuple[str, bytes, bytes]:
        """Returns (salt of a step, its source files as canonical JSON, its tools as canonical JSON). The salt
        is a hex digest of the source files and of the tools with their versions.
        """
        place = step.action, step.code, *step.tools.items()
        if place not in self._salts:
            code = self.files(step)
            self._salts[place] = salt(code, step.tools), canonical_plain(code), canonical(step.tools)
        return self._salts[place]


def step_modules(step: Step) -> tuple[str, ...]:
    """Returns the names of the modules whose imports are hashed into a step's cache key: the module of its
    action, and the modules that the action imports by name at run time.
    """
    return (step.action.partition(":")[0], *step.code)


def explain(
    graph: Graph, store: Store, name: str, sharing: Sharing | None = None
) -> tuple[Planned, tuple[Change, ...]]:
    """Returns the plan of the step `name`, and the differences between its cache key and the most similar
    recent record under its name.

    The differences are () while an input of the step is not built. Raises UsageError for an unknown step,
    SourceError for an unreadable source, and StoreError when the store cannot be read.
    """
    step = graph.step(name)
    planner = Planner(graph, store, only=frozenset((step.name,)), sharing=sharing)
    planned = Plan(tuple(planner.all()))[step.name]
    return planned, () if planned.key is None else planner.explain(step)
