"""Steps and how they hang together. Nothing here knows what a step does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mlcbuild.canon import Json, canonical
from mlcbuild.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import re

    import networkx


_GLOB = frozenset("*?[")
"""A pattern without any of these is a plain name."""


@dataclass(frozen=True)
class Input:
    """One argument of an action."""

    node: str
    """Name of the Step or Source that supplies it."""
    select: tuple[str, ...] = ()
    """Globs of the files that the action sees and that enter the key; () means all. `*` and `?` stay
    inside one part of a path, `**` crosses parts."""


@dataclass(frozen=True)
class Source:
    """Files on this machine that the user owns. They are read where they lie and never copied."""

    name: str
    root: Path
    files: tuple[str, ...]
    """Paths relative to `root`, with `/` between parts."""


@dataclass(frozen=True)
class Step:
    """One cached unit of work: `action(params, inputs, out)`, where action is "module:function"."""

    name: str
    action: str
    params: Mapping[str, Json]
    inputs: Mapping[str, Input]
    tools: Mapping[str, str] = field(default_factory=dict)
    """Tool -> version; part of the key."""
    code: tuple[str, ...] = ()
    """Modules that the action loads by name: their source files are part of the key, as the action's are."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Parameter or argument -> words for it in a reason ("scheme" -> "scheme q4"). Never in the key."""
    cores: int = 1
    """Cores it can use; it is told how many it got through MLCBUILD_CORES."""
    memory: int = 256 << 20
    """Bytes it needs at the peak."""
    needs: tuple[str, ...] = ()
    """What else the machine must have, as labels of workers; tools go without saying. Never in the key."""
    shared: bool = True
    """False: the result holds on this machine only, and is never sent to a remote."""
    alone: bool = False
    """It measures time: nothing else runs beside it."""


Node: TypeAlias = Step | Source


class Graph:
    """Checked steps and sources in an order in which each node follows what it needs. Immutable.

    Steps with the same action, parameters, tools and inputs are one: the first name is kept, the others
    become aliases. Raises UsageError with every problem found: unknown inputs, one name for two
    different nodes, a cycle with its path.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        given, problems = _by_name(nodes)
        problems += _unknown_inputs(given)
        if problems:
            raise UsageError("\n".join(problems))
        self.nodes: dict[str, Node] = {}
        self.params: dict[str, bytes] = {}
        """Canonical JSON of each step's parameters."""
        self._alias: dict[str, str] = {}
        self._merge(_ordered(given))
        self._needs: dict[str, tuple[str, ...]] = {}
        self.users: dict[str, list[str]] = {name: [] for name in self.nodes}
        """Node -> the steps that take it as an input, in order."""
        for step in self.steps():
            needs = dict.fromkeys(self.resolve(item.node) for item in step.inputs.values())
            self._needs[step.name] = tuple(needs)
            for name in needs:
                self.users[name].append(step.name)

    def _merge(self, ordered: Iterable[Node]) -> None:
        first: dict[tuple[object, ...], str] = {}
        for node in ordered:
            if isinstance(node, Step):
                try:
                    params = canonical(node.params)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"step {node.name}: {error}") from None
                inputs = tuple(
                    (arg, self.resolve(i.node), i.select) for arg, i in sorted(node.inputs.items())
                )
                identity = (node.action, node.code, params, tuple(sorted(node.tools.items())), inputs)
                kept = first.setdefault(identity, node.name)
                if kept != node.name:
                    self._alias[node.name] = kept
                    continue
                self.params[node.name] = params
            self.nodes[node.name] = node

    def resolve(self, name: str) -> str:
        """The name under which a node is kept; `name` itself unless it was merged into another."""
        return self._alias.get(name, name)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[self.resolve(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.nodes or name in self._alias

    def __len__(self) -> int:
        return len(self.nodes)

    def step(self, name: str) -> Step:
        """Raises UsageError when there is no such step."""
        node = self.nodes.get(self.resolve(name))
        if not isinstance(node, Step):
            known = [step.name for step in self.steps()]
            raise UsageError(f"there is no step '{name}'; {did_you_mean(name, known)}")
        return node

    def steps(self) -> Iterator[Step]:
        return (node for node in self.nodes.values() if isinstance(node, Step))

    def needs(self, step: Step) -> tuple[str, ...]:
        """Names of the nodes a step of this graph reads, each once."""
        return self._needs[step.name]

    def match(self, patterns: Iterable[str]) -> frozenset[str]:
        """The steps that the names or globs mean. Raises UsageError for those that mean none."""
        found: set[str] = set()
        problems = []
        known: list[str] = []
        for pattern in patterns:
            if isinstance(self.nodes.get(self.resolve(pattern)), Step):
                found.add(self.resolve(pattern))
                if not set(pattern) & _GLOB:
                    continue  # a plain name, as thousands may be: no other can match it
            known = known or [step.name for step in self.steps()] + list(self._alias)
            names = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
            if not names:
                problems.append(f"no step is called '{pattern}'; {did_you_mean(pattern, known)}")
            found.update(self.resolve(name) for name in names)
        if problems:
            raise UsageError("\n".join(problems))
        return frozenset(found)

    def closure(self, names: Iterable[str]) -> frozenset[str]:
        """The named nodes and everything they need."""
        import networkx

        kept = {self.resolve(name) for name in names}
        return frozenset(kept.union(*(networkx.ancestors(self.network, name) for name in kept)))

    @cached_property
    def network(self) -> networkx.DiGraph[str]:
        """The same graph for networkx, edges from a node to its users."""
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        graph.add_nodes_from(self.nodes)
        graph.add_edges_from((name, user) for name, users in self.users.items() for user in users)
        return graph


def _by_name(nodes: Iterable[Node]) -> tuple[dict[str, Node], list[str]]:
    given: dict[str, Node] = {}
    problems = []
    for node in nodes:
        if given.setdefault(node.name, node) is not node and given[node.name] != node:
            problems.append(f"two different steps or sources are called '{node.name}'")
        if isinstance(node, Step) and not all(node.action.partition(":")):
            problems.append(f"step '{node.name}': action '{node.action}' must be written module:function")
    return given, problems


def _unknown_inputs(given: Mapping[str, Node]) -> list[str]:
    return [
        f"step '{node.name}': input '{argument}' names '{item.node}', which no step or source supplies; "
        + did_you_mean(item.node, given)
        for node in given.values()
        if isinstance(node, Step)
        for argument, item in node.inputs.items()
        if item.node not in given
    ]


def _ordered(given: Mapping[str, Node]) -> list[Node]:
    sorter = TopologicalSorter(
        {
            name: dict.fromkeys(item.node for item in node.inputs.values()) if isinstance(node, Step) else ()
            for name, node in given.items()
        }
    )
    try:
        return [given[name] for name in sorter.static_order()]
    except CycleError as error:
        path = " -> ".join(reversed(error.args[1]))
        raise UsageError(f"the steps need each other in a circle: {path}") from None


def selected(path: str, globs: Sequence[str]) -> bool:
    """Whether an input that selects `globs` holds the file `path`."""
    return not globs or any(_pattern(glob).fullmatch(path) for glob in globs)


@lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    import re

    tokens = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(token) or re.escape(token) for token in tokens), re.DOTALL)
