"""Divides the steps of a build into shards for machines that cannot communicate.

Every machine computes the split by itself, so it may depend only on what is equal everywhere: the graph's
names and edges, and the file of durations that is committed beside the recipe. It does not depend on a store
(each machine has its own, and a shard that starts late finds more in it) nor on keys (they hold tool
versions). `Split.identity` is a digest of all inputs: machines with the same identity have the same split.

Machines with different splits, or a failing shard, cost time but not correctness: a later run without
`--shard` builds whatever is missing.

The problem is scheduling with shared set-up work: each shard that needs a step, and does not find its result,
pays its cost. Final steps (those on which no other step depends) that share a step of at least T milliseconds
are kept together, for every relevant T; the groups are assigned, longest first, to the shard that they leave
least loaded (Graham's LPT, 1969). The T with the shortest longest shard is chosen, and among equals the one
with the least total work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mlcbuild_format import regular, strict_json

from mlcbuild.build.graph import Graph, Step
from mlcbuild.build.plan import Plan
from mlcbuild.canon import Json, digest
from mlcbuild.errors import InputError, Problem, UsageError
from mlcbuild.store.store import Store

WEIGHTS: Mapping[str, int] = {
    "fetch": 60_000,
    "reference": 30_000,
    "weights": 30_000,
    "library": 20_000,
    "verify": 15_000,
    "bundle": 2_000,
}
"""First part of a build step's name -> milliseconds that are assumed if no duration of such a step is
recorded. For other names OTHER is assumed.
"""
OTHER = 1_000
TRIFLE = 2_000
"""Milliseconds of work below which one machine's share (shard) of a build repeats the work instead of waiting
until another machine has done it."""
FORMAT = "mlcbuild-durations/1"
_LARGEST = 64 << 20
"""Maximum size in bytes of a file of step durations; a larger one is refused."""
_TRIED = 16
"""Maximum number of thresholds, besides one above all durations, that are tried for dividing a build among
machines. A threshold is a duration of a build step: all final steps (on which no other step depends) that
share a step at least that long go to the same machine. If there are more different durations, evenly spaced
ones are tried."""


@dataclass(frozen=True)
class StepShard:
    """The part of a build that one machine (shard) runs: names of steps, and the expected duration of its
    work."""

    steps: tuple[str, ...]
    """Names of the build steps that this shard (one machine's share of a build) must build, in the order of
    the whole build's graph of steps. Every step belongs to exactly one shard.
    """
    first: tuple[str, ...]
    """Names of the shard's build steps that need few results of other shards. They run first, while the other
    shards produce results.
    """
    milliseconds: int
    """Sum of the expected durations, in milliseconds, of this shard's steps and of all their dependencies,
    also of those that other shards build: its work if neither a store nor another shard has any result."""


@dataclass(frozen=True)
class Split:
    """The division of a build into shards, each of which one machine builds."""

    shards: tuple[StepShard, ...]
    identity: str
    """Eight hex digits, a digest of everything on which the division of a build into shards depends: the
    number of shards, and the steps with their durations and dependencies. Machines with the same digits have
    the same shards.
    """


def parse(text: str) -> tuple[int, int]:
    """Parses the number of one machine's share (shard) of a build, such as "2/3" into (2, 3), which is share
    2 of 3. Raises UsageError for any other text, for shares that do not exist, such as "0/3" and "4/3", and
    for numbers of more than four digits.
    """
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text}: write i/n with 1 <= i <= n, for example 1/3")
    return int(match[1]), int(match[2])


def split(graph: Graph, only: Iterable[str], count: int, durations: Mapping[str, int]) -> Split:
    """Divides build steps and their dependencies into `count` shards (shares of the build, one for each
    machine), and returns a Split. count: at least 1; a shard may be empty. only: names of steps in the graph;
    () means all steps.

    durations: name of a step -> milliseconds; a step that is missing there gets an estimate. The result is
    deterministic."""
    chosen = [graph.resolve(name) for name in only]
    needed = graph.closure(chosen) if chosen else frozenset(graph.nodes)
    steps = [step for step in graph.steps() if step.name in needed]
    closures = _closures(graph, steps)
    costs = step_costs(steps, durations)
    ends = sorted(step.name for step in steps if not any(user in needed for user in graph.users[step.name]))
    best = min(
        (_deal(_groups(ends, closures, costs, least), closures, costs, count) for least in _levels(costs)),
        key=lambda dealt: (max(dealt.loads), sum(dealt.loads)),
    )
    owners = _owners(steps, best, closures)
    shards = []
    for index in range(count):
        mine = [step.name for step in steps if owners[step.name] == index]
        first = [name for name in mine if _early(name, index, owners, closures, costs)]
        shards.append(StepShard(tuple(mine), tuple(first), best.loads[index]))
    inputs: list[Json] = [
        [name, cost, list[Json](sorted(closures[name]))] for name, cost in sorted(costs.items())
    ]
    return Split(tuple(shards), digest("split/1", [count, inputs])[:8])


def _early(
    name: str,
    index: int,
    owners: Mapping[str, int],
    closures: Mapping[str, frozenset[str]],
    costs: Mapping[str, int],
) -> bool:
    """Returns True if a shard can run a build step before other shards have results: repeating the
    dependencies that others build takes at most two seconds, or not longer than the step itself. index: the
    shard; owners: step -> shard; closures: step -> its dependencies; costs: step -> milliseconds.
    """
    theirs = sum(costs[need] for need in closures[name] if owners[need] != index)
    return theirs <= max(costs[name], TRIFLE)


@dataclass
class _Dealt:
    """One possible assignment of final steps to the machines (shards) that share a build. Final steps are the
    build steps on which no other step depends.
    """

    held: list[set[str]]
    """For each shard, the names of its final steps and of all their dependencies: what it would run if
    neither a store nor another shard had any result. A step that several shards need is in each of their
    sets."""
    loads: list[int]
    """For each shard (one machine's share of a build), the sum in milliseconds of the durations of all steps
    in its set `held`, including dependencies that other shards hold, too."""


def _closures(graph: Graph, steps: Iterable[Step]) -> dict[str, frozenset[str]]:
    """Returns name of a build step -> names of the step and of all its direct and indirect dependencies among
    `steps`. steps: ordered so that each one comes after those on which it depends."""
    closures: dict[str, frozenset[str]] = {}
    for step in steps:
        closures[step.name] = frozenset((step.name,)).union(
            *(closures[need] for need in graph.needs(step) if need in closures)
        )
    return closures


def step_costs(steps: Iterable[Step], durations: Mapping[str, int]) -> dict[str, int]:
    """Returns name of a build step -> milliseconds, at least 1: the recorded duration in `durations`, else
    the median duration there of steps of the same kind (first part of the name), else a constant of that
    kind."""
    kinds: dict[str, list[int]] = {}
    for name, value in durations.items():
        kinds.setdefault(_kind(name), []).append(value)
    usual = {**WEIGHTS, **{kind: int(median(values)) for kind, values in kinds.items()}}
    return {step.name: max(1, durations.get(step.name, usual.get(_kind(step.name), OTHER))) for step in steps}


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _levels(costs: Mapping[str, int]) -> list[int]:
    """Returns thresholds in milliseconds, ascending. With each of them, all final steps (on which no other
    step depends) that share a step at least that long are built by the same machine. costs: step ->
    milliseconds. The last threshold is above all durations, so that it keeps no steps together.
    """
    levels = sorted(set(costs.values()))
    if len(levels) > _TRIED:
        levels = [levels[i * (len(levels) - 1) // (_TRIED - 1)] for i in range(_TRIED)]
    return [*levels, max(levels, default=0) + 1]


def _groups(
    ends: Iterable[str], closures: Mapping[str, frozenset[str]], costs: Mapping[str, int], least: int
) -> list[list[str]]:
    """Groups final build steps (on which no other step depends) that share a dependency of at least `least`
    ms, directly or through other final steps, and returns the groups; one machine builds a whole group. ends:
    names of final steps; closures: step -> itself and its dependencies; costs: step -> milliseconds.
    """
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            leader[name] = name = leader[leader[name]]
        return name

    for end in ends:
        for step in closures[end]:
            if costs[step] >= least:
                leader[find(step)] = find(end)
    groups: dict[str, list[str]] = {}
    for end in ends:
        groups.setdefault(find(end), []).append(end)
    return list(groups.values())


def _deal(
    groups: Iterable[list[str]], closures: Mapping[str, frozenset[str]], costs: Mapping[str, int], count: int
) -> _Dealt:
    dealt = _Dealt([set() for _ in range(count)], [0] * count)
    jobs = []
    for group in groups:
        steps = frozenset[str]().union(*(closures[end] for end in group))
        jobs.append((-sum(costs[step] for step in steps), group[0], steps))
    for _, _, steps in sorted(jobs, key=lambda job: job[:2]):
        after = [
            load + sum(costs[step] for step in steps if step not in held)
            for load, held in zip(dealt.loads, dealt.held, strict=True)
        ]
        index = min(range(count), key=after.__getitem__)
        dealt.held[index] |= steps
        dealt.loads[index] = after[index]
    return dealt


def _owners(steps: Iterable[Step], dealt: _Dealt, closures: Mapping[str, frozenset[str]]) -> dict[str, int]:
    """Returns name of a build step -> index, from 0, of the shard (one machine's share of the build) that
    builds the step: the shard in which most steps, itself included, need it; of equal ones the first."""
    uses: dict[str, list[int]] = {}
    for index, remote_names in enumerate(dealt.held):
        for name in remote_names:
            for need in closures[name]:
                uses.setdefault(need, [0] * len(dealt.held))[index] += 1
    return {
        step.name: max(range(len(dealt.held)), key=lambda index: (uses[step.name][index], -index))
        for step in steps
    }


# Durations


def place(recipe: Path) -> Path:
    """Returns the path of the file with the durations of a recipe's steps, which users commit together with
    the recipe: RECIPE.durations.json for RECIPE.yaml or RECIPE with any other suffix."""
    return recipe.with_suffix(".durations.json")


def read(path: Path) -> dict[str, int]:
    """Reads a file of the durations of build steps and returns name of a step -> milliseconds; {} if the file
    does not exist. Raises InputError if it is malformed or cannot be read."""
    try:
        document = strict_json.parse(regular.read(path, _LARGEST))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError([Problem(str(path), 0, 0, f"cannot be read: {error}; {_AGAIN}")]) from None
    steps = (
        document.get("milliseconds")
        if isinstance(document, dict) and document.get("format") == FORMAT
        else None
    )
    if not isinstance(steps, dict) or not all(type(value) is int and value >= 0 for value in steps.values()):
        raise InputError([Problem(str(path), 0, 0, f"is not a file of durations ({FORMAT}); {_AGAIN}")])
    return steps


_AGAIN = "write it anew with `mlcbuild shard RECIPE --record`"


def recorded(graph: Graph, store: Store) -> dict[str, int]:
    """Returns name of a build step -> milliseconds that it took, according to the latest of its records in
    the store that states a duration. Steps without such a record are left out."""
    durations = {}
    for step in graph.steps():
        for key in store.cache.keys(step.name):
            record = store.record(key)
            try:
                spent = record.info.measured.milliseconds if record is not None else 0
            except ValueError:  # The record is damaged in a part that only this function reads.
                continue
            if spent:
                durations[step.name] = spent
                break
    return durations


def pending(graph: Graph, plan: Plan, store: Store, file: Path) -> dict[str, float]:
    """Returns name of a build step -> expected seconds, for the steps of a plan whose results are not in the
    store: the last duration in this store, else the one in `file`, the file of durations, else an estimate.
    Raises InputError for a damaged file of durations."""
    names = {step.name for step in plan.steps if step.state != "hit"}
    costs = step_costs(graph.steps(), {**read(file), **recorded(graph, Store(store.root))})
    return {name: cost / 1000 for name, cost in costs.items() if name in names}


def write(path: Path, durations: Mapping[str, int]) -> None:
    """Writes durations of build steps (name of a step -> milliseconds) to a file. Raises UsageError if it
    cannot be written.
    """
    document = {"format": FORMAT, "milliseconds": dict(sorted(durations.items()))}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
