"""The dependency graph of build steps and source files. Nothing here depends on what a step computes."""

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
"""The characters `*`, `?` and `[`: a pattern with one of them is a glob, any other an exact name."""


@dataclass(frozen=True)
class Input:
    """One named argument of a build step's action: files of another step or of the user."""

    node: str
    """Name of the build step, or of the directory of source files, whose files are passed to the action that
    has this input.
    """
    select: tuple[str, ...] = ()
    """Globs of those files of the input that the step's action can read and that are hashed into the step's
    cache key; () means all files.

    `*` and `?` match inside one component of a path, `**` matches across components.
    """


@dataclass(frozen=True)
class Source:
    """Files of the user on this machine, below one directory, that are inputs of build steps. Steps read them
    where they are; they are never copied.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    """Paths of the user's files relative to `root`, separated by `/`."""


@dataclass(frozen=True)
class StepDisplay:
    """The words and figures with which messages and progress show a build step. They are not part of its
    cache key.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    """Name of a parameter or input of a build step -> words that describe it in the reasons why the step runs
    ("scheme" -> "scheme q4").
    """
    subject: str = ""
    """The object on which the step works, for messages; "" if the step's name contains it."""
    typical: float = 0.0
    """Seconds that a build step of this sort usually takes, which estimate its first run; 0 if unknown, or if
    the step reports its progress.
    """


@dataclass(frozen=True)
class Step:
    """One cached unit of work of a build: a call `action(params, inputs, out)`, where the action is a
    function written "module:function" that writes its result to the directory `out`.
    """

    name: str
    action: str
    params: Mapping[str, Json]
    inputs: Mapping[str, Input]
    tools: Mapping[str, str] = field(default_factory=dict)
    """Name of a tool that the step's action uses, such as a compiler -> its version; part of the step's cache
    key.
    """
    code: tuple[str, ...] = ()
    """Names of further modules, which the step's action (a function "module:function") imports by name at run
    time. Their source files are hashed into the step's cache key, as those of the action's module are.
    """
    cores: int = 1
    """Maximum number of CPU cores that a step's action can use. The action reads the number that it gets from
    the environment variable MLCBUILD_CORES.
    """
    memory: int = 256 << 20
    """Peak memory that the step's action may use, in bytes."""
    needs: tuple[str, ...] = ()
    """Labels, such as "gpu", that a cluster worker needs to run the build step in addition to the step's
    tools. They are not part of the step's cache key.
    """
    shared: bool = True
    """False if the result of a build step is valid on this machine only and is never sent to a remote
    cache.
    """
    alone: bool = False
    """True for a build step that measures time: no other step runs at the same time."""
    display: StepDisplay = field(default_factory=StepDisplay, compare=False)


Node: TypeAlias = Step | Source


class Graph:
    """An immutable, validated graph of build steps and sources, ordered so that each node follows its inputs.

    Steps with equal action, parameters, tools and inputs are merged: the first name is kept, the others
    become aliases. Raises UsageError with all problems: unknown inputs, one name for two different nodes, or
    a dependency cycle with its path.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        by_name, problems = _by_name(nodes)
        problems += _unknown_inputs(by_name)
        if problems:
            raise UsageError("\n".join(problems))
        self.nodes: dict[str, Node] = {}
        self.params: dict[str, bytes] = {}
        """Name of a step -> its parameters as canonical JSON."""
        self._alias: dict[str, str] = {}
        self._merge(_ordered(by_name))
        self._needs: dict[str, tuple[str, ...]] = {}
        self.users: dict[str, list[str]] = {name: [] for name in self.nodes}
        """Name of a step or source -> names of the steps that read its files, in the graph's order."""
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
                first_name = first.setdefault(identity, node.name)
                if first_name != node.name:
                    self._alias[node.name] = first_name
                    continue
                self.params[node.name] = params
            self.nodes[node.name] = node

    def resolve(self, name: str) -> str:
        """Returns the name under which the graph holds a step or source: for a step that was merged with an
        equal one, the name of the one that stands first in the graph.
        """
        return self._alias.get(name, name)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[self.resolve(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.nodes or name in self._alias

    def __len__(self) -> int:
        return len(self.nodes)

    def step(self, name: str) -> Step:
        """Returns the step of the graph with this name or alias (the name of a step that was merged with an
        equal one). Raises UsageError if there is none.
        """
        node = self.nodes.get(self.resolve(name))
        if not isinstance(node, Step):
            names = [step.name for step in self.steps()]
            raise UsageError(f"there is no step '{name}'; {did_you_mean(name, names)}")
        return node

    def steps(self) -> Iterator[Step]:
        return (node for node in self.nodes.values() if isinstance(node, Step))

    def needs(self, step: Step) -> tuple[str, ...]:
        """Returns the names of the steps and sources that a step reads, each once."""
        return self._needs[step.name]

    def match(self, patterns: Iterable[str]) -> frozenset[str]:
        """Returns the names of the graph's steps that match any of the patterns, which are step names or
        globs.

        Raises UsageError for a pattern that matches no step.
        """
        matches: set[str] = set()
        problems = []
        all_names: list[str] = []
        for pattern in patterns:
            if isinstance(self.nodes.get(self.resolve(pattern)), Step):
                matches.add(self.resolve(pattern))
                if not set(pattern) & _GLOB:
                    # A name matches one step. Skipping the search keeps thousands of names fast.
                    continue
            all_names = all_names or [step.name for step in self.steps()] + list(self._alias)
            matching = [name for name in all_names if name == pattern or fnmatchcase(name, pattern)]
            if not matching:
                problems.append(f"no step is called '{pattern}'; {did_you_mean(pattern, all_names)}")
            matches.update(self.resolve(name) for name in matching)
        if problems:
            raise UsageError("\n".join(problems))
        return frozenset(matches)

    def closure(self, names: Iterable[str]) -> frozenset[str]:
        """Returns the given names of steps and sources, and the names of all steps and sources on which these
        depend, directly or indirectly.
        """
        import networkx

        resolved = {self.resolve(name) for name in names}
        return frozenset(resolved.union(*(networkx.ancestors(self.network, name) for name in resolved)))

    @cached_property
    def network(self) -> networkx.DiGraph[str]:
        """Returns the graph's steps and sources as a networkx graph of their names, with an edge from each
        step or source to every step that reads its files.
        """
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        graph.add_nodes_from(self.nodes)
        graph.add_edges_from((name, user) for name, users in self.users.items() for user in users)
        return graph


def _by_name(nodes: Iterable[Node]) -> tuple[dict[str, Node], list[str]]:
    by_name: dict[str, Node] = {}
    problems = []
    for node in nodes:
        if by_name.setdefault(node.name, node) is not node and by_name[node.name] != node:
            problems.append(f"two different steps or sources are called '{node.name}'")
        if isinstance(node, Step) and not all(node.action.partition(":")):
            problems.append(f"step '{node.name}': action '{node.action}' must be written module:function")
    return by_name, problems


def _unknown_inputs(by_name: Mapping[str, Node]) -> list[str]:
    return [
        f"step '{node.name}': input '{argument}' names '{item.node}', which no step or source supplies; "
        + did_you_mean(item.node, by_name)
        for node in by_name.values()
        if isinstance(node, Step)
        for argument, item in node.inputs.items()
        if item.node not in by_name
    ]


def _ordered(by_name: Mapping[str, Node]) -> list[Node]:
    sorter = TopologicalSorter(
        {
            name: dict.fromkeys(item.node for item in node.inputs.values()) if isinstance(node, Step) else ()
            for name, node in by_name.items()
        }
    )
    try:
        return [by_name[name] for name in sorter.static_order()]
    except CycleError as error:
        path = " -> ".join(reversed(error.args[1]))
        raise UsageError(f"the steps depend on each other in a cycle: {path}") from None


def selected(path: str, globs: Sequence[str]) -> bool:
    """Returns True if a file's path matches one of the globs, or if there are no globs. `*` and `?` match
    inside one component of the path, `**` across components.
    """
    return not globs or any(_pattern(glob).fullmatch(path) for glob in globs)


@lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    import re

    tokens = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(token) or re.escape(token) for token in tokens), re.DOTALL)
