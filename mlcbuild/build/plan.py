"""What a run would do, step by step, and why."""

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
from mlcbuild.store.store import Store

State: TypeAlias = Literal["hit", "remote", "run", "pending"]

_LARGE = 256 << 20
"""Bytes from which reading a source file takes long enough to be told."""


@dataclass(frozen=True)
class Planned:
    """What a plan says of one step."""

    name: str
    state: State
    key: str | None
    """None while an input is not built yet."""
    reason: str
    """Why it is not a hit, in words; "" for a hit."""
    record: Record | None = None
    """Set for a hit and for "remote"; for others the latest record of a step of this name, for estimates."""
    origin: str = ""
    """The remote that has the record, for "remote": files that this machine needs are fetched."""


@dataclass(frozen=True)
class Plan:
    """Every step a run would look at, in order."""

    steps: tuple[Planned, ...]

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
    """The plan of a run: `force` names or globs of steps to run anyway, `only` of the steps wanted.

    Reads sources (through the stat cache) and records, writes nothing but the stat cache. Raises
    UsageError for a name that means no step, SourceError for a source that cannot be read, StoreError.
    What is wrong with remotes is reported as warnings.
    """
    chosen, wanted = graph.match(force), graph.match(only)
    planner = Planner(graph, store, force=chosen, only=wanted, sharing=sharing, report=report)
    planned = Plan(tuple(planner.all()))
    for sentence in planner.sharing.take_warnings():
        report(Warned(sentence))
    store.cache.save()
    return planned


class Planner:
    """Decides about one step at a time, given the results of the steps before it.

    A run asks again whenever a result becomes known, so that a step whose inputs came out as before is a
    hit after all (early cut-off).
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
        wanted = graph.closure(only) if only else graph.nodes
        self.steps = [step for step in graph.steps() if step.name in wanted]
        self.results: dict[str, Record | Tree] = {}
        """What is known of each node: the tree of a source, the record of a step."""
        self.stats: dict[str, dict[str, tuple[int, int]]] = {}
        """Source -> file -> (size, mtime_ns) that its digest belongs to."""
        self._report = report
        self._code: dict[tuple[str, ...], dict[str, str]] = {}
        self._salts: dict[tuple[object, ...], tuple[str, bytes, bytes]] = {}
        self._sources: SourceFiles = {}
        self._rows_texts: dict[str, bytes] = {}
        """Digest of a tree -> its files as canonical JSON."""
        self._selections: dict[tuple[str, tuple[str, ...]], Tree] = {}
        problems = []
        for node in graph.nodes.values():
            if isinstance(node, Source) and node.name in wanted:
                problems += self._read(node)
        if problems:
            raise SourceError("\n".join(problems))

    def all(self) -> Iterator[Planned]:
        """Every step, in order."""
        found: dict[str, Planned] = {}
        for wave in [self.steps] if self.sharing.empty else self._waves():
            if not self.sharing.empty:
                self.sharing.look_up(self._unknown(wave))
            for step in wave:
                planned = found[step.name] = self.consider(step)
                if planned.state in ("hit", "remote") and planned.record is not None:
                    self.results[step.name] = planned.record
        return (found[step.name] for step in self.steps)

    def _waves(self) -> list[list[Step]]:
        """Steps by the length of the longest chain of steps before them: those of a wave can be looked up
        together.
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
        """Keys of steps that only a remote may know."""
        for step in steps:
            if step.shared and all(need in self.results for need in self.graph.needs(step)):
                key = self.key(step)
                if self.store.record(key) is None:
                    yield key

    def consider(self, step: Step) -> Planned:
        """The state of a step whose inputs are as `results` says."""
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
        if step.shared and (found := self.sharing.find(key)) is not None:
            return Planned(step.name, "remote", key, f"from {found.origin}", found.record, found.origin)
        if record is None:
            return Planned(step.name, "run", key, *self._why(step, key))
        return Planned(step.name, "run", key, lost, record)

    def key(self, step: Step) -> str:
        """Raises UsageError when the action's module is not found."""
        inputs = {argument: self._digest(item) for argument, item in step.inputs.items()}
        return step_key(step.action, self.graph.params[step.name], self._salt(step)[0], inputs)

    def preimage(self, step: Step) -> Preimage:
        """All that the key is made of. The step's inputs must be known."""
        inputs = {argument: self.tree(item) for argument, item in step.inputs.items()}
        params = json.loads(self.graph.params[step.name])
        return Preimage(step.action, params, self.code(step), dict(step.tools), inputs)

    def _expected(self, step: Step) -> Expected:
        """What the record of a step must say, as `key` is computed from it."""
        _, code, tools = self._salt(step)
        inputs = {argument: self._rows(item) for argument, item in step.inputs.items()}
        return Expected.of(step.action, code, inputs, self.graph.params[step.name], tools)

    def _rows(self, item: Input) -> bytes:
        """The files of an input as canonical JSON."""
        tree = self.tree(item)
        if tree.digest not in self._rows_texts:
            rows = [(entry.path, entry.digest, entry.size) for entry in tree.files]
            self._rows_texts[tree.digest] = canonical_plain(rows)
        return self._rows_texts[tree.digest]

    def tree(self, item: Input) -> Tree:
        """The files that an input selects."""
        found = self.results[self.graph.resolve(item.node)]
        if not item.select:
            return found if isinstance(found, Tree) else Tree(found.tree, found.files)
        place = (found.digest if isinstance(found, Tree) else found.tree, item.select)
        known = self._selections.get(place)
        if known is None:
            files = tuple(entry for entry in found.files if selected(entry.path, item.select))
            known = self._selections[place] = Tree(tree_digest(files), files)
        return known

    def code(self, step: Step) -> dict[str, str]:
        """Source file -> BLAKE3, for all that the action of a step imports or loads by name."""
        modules = step_modules(step)
        if modules not in self._code:
            for module in modules:
                if module_path(module) is None:
                    raise UsageError(
                        f"step {step.name}: there is no module '{module}' for its action {step.action}"
                    )
            self._code[modules] = code_files(
                *modules, known=self._sources, imports=self.store.cache.imports()
            )
        return self._code[modules]

    def explain(self, step: Step) -> tuple[Change, ...]:
        """The differences between a step and the closest recent record of its name; () when there is none."""
        image = self.preimage(step)
        key = image.key()
        recent = (self.store.record(old) for old in self.store.cache.keys(step.name) if old != key)
        found = []
        for old in recent:
            with suppress(ValueError):  # a record may be damaged in the part that only this reads
                if old is not None:
                    found.append(compare(old.made.preimage, image, step.labels))
        return min(found, key=len, default=())

    def _digest(self, item: Input) -> str:
        if item.select:
            return self.tree(item).digest
        found = self.results[self.graph.resolve(item.node)]
        return found.digest if isinstance(found, Tree) else found.tree

    def _salt(self, step: Step) -> tuple[str, bytes, bytes]:
        """The salt of a step, and what it is made of as canonical JSON: source files and tools."""
        place = step.action, step.code, *step.tools.items()
        if place not in self._salts:
            code = self.code(step)
            self._salts[place] = salt(code, step.tools), canonical_plain(code), canonical(step.tools)
        return self._salts[place]

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
                digest, found = self.store.cache.digest(source.root / name, self._announce)
            except OSError as error:
                problems.append(f"{source.name}: {source.root / name}: {error.strerror or error}")
                continue
            entries.append(Entry(name, digest, found.st_size))
            stats[name] = (found.st_size, found.st_mtime_ns)
        self.results[source.name] = Tree.of(entries)
        return problems


def step_modules(step: Step) -> tuple[str, ...]:
    """The modules whose import closures are in a step's key: its action's, and those loaded by name."""
    return (step.action.partition(":")[0], *step.code)


def explain(
    graph: Graph, store: Store, name: str, sharing: Sharing | None = None
) -> tuple[Planned, tuple[Change, ...]]:
    """A step's plan and every difference to the closest recent record of its name.

    No differences are given while an input is not built. Raises as `plan` does.
    """
    step = graph.step(name)
    planner = Planner(graph, store, only=frozenset((step.name,)), sharing=sharing)
    planned = Plan(tuple(planner.all()))[step.name]
    return planned, () if planned.key is None else planner.explain(step)
