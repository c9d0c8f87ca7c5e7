"""Shards: the steps of a build, dealt out to machines that cannot talk to each other.

Every machine computes the split by itself, so it may depend only on what all of them see alike: the graph's
names and edges, and the file of durations that is committed beside the recipe. It never looks at a store
(each machine has its own, and a shard that starts late finds more in it) nor at keys (they hold versions of
tools). `Split.identity` names all that went in: two machines that print the same one agree.

Machines that disagree, or a shard that fails, cost time and not correctness: a run without `--shard`
afterwards builds whatever is missing.

The problem is scheduling with shared set-up work: a step's cost is paid by each shard that needs it and
does not find it done. Final steps that share a step worth at least T are kept together, for every T that
makes a difference; the groups go, longest first, to the shard that they leave least loaded (Graham's LPT,
1969); the T with the shortest longest shard wins, then the one with the least work in all.
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
"""Milliseconds assumed for a step of which nothing was recorded, by the first part of its name."""
OTHER = 1_000
TRIFLE = 2_000
"""Milliseconds that are not worth waiting for."""
FORMAT = "mlcbuild-durations/1"
_LARGEST = 64 << 20
"""Bytes of a file of durations."""
_TRIED = 16
"""Thresholds tried; evenly chosen where there are more."""


@dataclass(frozen=True)
class Shard:
    steps: tuple[str, ...]
    """What it owns, in the graph's order. Every step is owned by exactly one shard."""
    first: tuple[str, ...]
    """Those of them that need little of what other shards own: done first, so that the others' work can
    arrive meanwhile."""
    milliseconds: int
    """What it has to do when no store holds anything."""


@dataclass(frozen=True)
class Split:
    shards: tuple[Shard, ...]
    identity: str
    """Eight hex digits, alike on machines that agree."""


def parse(text: str) -> tuple[int, int]:
    """ "2/3" -> (2, 3). Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"--shard {text}: write i/n with 1 <= i <= n, for example 1/3")
    return int(found[1]), int(found[2])


def split(graph: Graph, only: Iterable[str], count: int, durations: Mapping[str, int]) -> Split:
    """Deals out the steps named in `only` (() means all) and what they need. Deterministic."""
    chosen = [graph.resolve(name) for name in only]
    wanted = graph.closure(chosen) if chosen else frozenset(graph.nodes)
    steps = [step for step in graph.steps() if step.name in wanted]
    closures = _closures(graph, steps)
    costs = _costs(steps, durations)
    ends = sorted(step.name for step in steps if not any(user in wanted for user in graph.users[step.name]))
    best = min(
        (_deal(_groups(ends, closures, costs, least), closures, costs, count) for least in _levels(costs)),
        key=lambda dealt: (max(dealt.loads), sum(dealt.loads)),
    )
    owners = _owners(steps, best, closures)
    shards = []
    for index in range(count):
        mine = [step.name for step in steps if owners[step.name] == index]
        first = [name for name in mine if _early(name, index, owners, closures, costs)]
        shards.append(Shard(tuple(mine), tuple(first), best.loads[index]))
    seen: list[Json] = [
        [name, cost, list[Json](sorted(closures[name]))] for name, cost in sorted(costs.items())
    ]
    return Split(tuple(shards), digest("split/1", [count, seen])[:8])


def _early(
    name: str,
    index: int,
    owners: Mapping[str, int],
    closures: Mapping[str, frozenset[str]],
    costs: Mapping[str, int],
) -> bool:
    """Whether doing what a step needs of other shards once more is a trifle, or no more than its own work."""
    theirs = sum(costs[need] for need in closures[name] if owners[need] != index)
    return theirs <= max(costs[name], TRIFLE)


@dataclass
class _Dealt:
    held: list[set[str]]
    """Shard -> the steps it would do if no store held anything."""
    loads: list[int]


def _closures(graph: Graph, steps: Iterable[Step]) -> dict[str, frozenset[str]]:
    """Step -> it and every step it needs, directly or not."""
    found: dict[str, frozenset[str]] = {}
    for step in steps:
        found[step.name] = frozenset((step.name,)).union(
            *(found[need] for need in graph.needs(step) if need in found)
        )
    return found


def _costs(steps: Iterable[Step], durations: Mapping[str, int]) -> dict[str, int]:
    """Milliseconds of each step: as recorded, else the median of its kind, else WEIGHTS."""
    kinds: dict[str, list[int]] = {}
    for name, value in durations.items():
        kinds.setdefault(_kind(name), []).append(value)
    usual = {**WEIGHTS, **{kind: int(median(values)) for kind, values in kinds.items()}}
    return {step.name: max(1, durations.get(step.name, usual.get(_kind(step.name), OTHER))) for step in steps}


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _levels(costs: Mapping[str, int]) -> list[int]:
    """Thresholds worth trying: each cost that occurs, and one that keeps nothing together."""
    found = sorted(set(costs.values()))
    if len(found) > _TRIED:
        found = [found[i * (len(found) - 1) // (_TRIED - 1)] for i in range(_TRIED)]
    return [*found, max(found, default=0) + 1]


def _groups(
    ends: Iterable[str], closures: Mapping[str, frozenset[str]], costs: Mapping[str, int], least: int
) -> list[list[str]]:
    """Final steps that share a step worth at least `least`, directly or through others."""
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
    """One owner for each step, among the shards that need it anyway: the one that needs it for the most."""
    uses: dict[str, list[int]] = {}
    for index, held in enumerate(dealt.held):
        for name in held:
            for need in closures[name]:
                uses.setdefault(need, [0] * len(dealt.held))[index] += 1
    return {
        step.name: max(range(len(dealt.held)), key=lambda index: (uses[step.name][index], -index))
        for step in steps
    }


# Durations


def place(recipe: Path) -> Path:
    """Where the durations of a recipe are kept, to be committed with it."""
    return recipe.with_suffix(".durations.json")


def read(path: Path) -> dict[str, int]:
    """Step -> milliseconds; {} when there is no such file. Raises InputError."""
    try:
        found = strict_json.parse(regular.read(path, _LARGEST))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError([Problem(str(path), 0, 0, f"cannot be read: {error}; {_AGAIN}")]) from None
    steps = found.get("milliseconds") if isinstance(found, dict) and found.get("format") == FORMAT else None
    if not isinstance(steps, dict) or not all(type(value) is int and value >= 0 for value in steps.values()):
        raise InputError([Problem(str(path), 0, 0, f"is not a file of durations ({FORMAT}); {_AGAIN}")])
    return steps


_AGAIN = "write it anew with `mlcbuild shard RECIPE --record`"


def recorded(graph: Graph, store: Store) -> dict[str, int]:
    """Milliseconds of each step of the graph as this store's latest record of it says."""
    found = {}
    for step in graph.steps():
        for key in store.cache.keys(step.name):
            record = store.record(key)
            try:
                spent = record.made.measured.milliseconds if record is not None else 0
            except ValueError:  # damaged in the part that only this reads
                continue
            if spent:
                found[step.name] = spent
                break
    return found


def write(path: Path, durations: Mapping[str, int]) -> None:
    """Raises UsageError."""
    document = {"format": FORMAT, "milliseconds": dict(sorted(durations.items()))}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
