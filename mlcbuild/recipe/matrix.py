"""Which combinations of model, quantization and target a recipe builds. Knows names only.

The rules are those of a GitHub Actions matrix ("Running variations of jobs in a workflow", include and
exclude): exclusions apply to the product of the axes; then every include entry, in order, is added to each
combination of the product that it does not contradict, and where there is none it makes a combination of
its own, to which no other entry is added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, product
from typing import TypeAlias

AXES = ("model", "quantization", "target")

Names: TypeAlias = tuple[str, str, str]
"""One name for each of AXES."""

MOST_SETTINGS = 1_000_000
"""How often cells may take the settings of include entries, over all of both."""


@dataclass(frozen=True)
class Entry:
    """One entry of include or exclude: a name, or None, for each of AXES."""

    index: int
    names: tuple[str | None, str | None, str | None]

    @property
    def mask(self) -> tuple[bool, ...]:
        return tuple(name is not None for name in self.names)


@dataclass(frozen=True)
class Cell:
    """One combination, and the indices of the include entries whose settings it takes, in order."""

    names: Names
    includes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Expansion:
    cells: tuple[Cell, ...]
    idle: tuple[int, ...]
    """Exclude entries that match no combination of the product."""
    loose: tuple[int, ...]
    """Include entries that match no combination and do not name all axes, so that they cannot make one."""
    repeated: tuple[int, ...]
    """Include entries that make a combination which an earlier one made."""
    crowded: int | None = None
    """The include entry with which the cells take settings from entries too often; nothing else is told."""


def expand(axes: Sequence[Sequence[str]], exclude: Sequence[Entry], include: Sequence[Entry]) -> Expansion:
    """The cells in the order of the axes, then those of include entries.

    Time is linear in the product, the entries, and how often a cell takes the settings of an entry.
    """
    excludes, includes = _Index(exclude), _Index(include)
    excluding: set[int] = set()
    including: set[int] = set()
    cells: list[Cell] = []
    taken = 0
    for names in product(*axes):
        hits = excludes.matching(names)
        if hits:
            for bucket in hits:
                excluding.update(bucket)
                bucket.clear()  # these need not be found again, but the bucket goes on to match
            continue
        added = tuple(sorted(index for bucket in includes.matching(names) for index in bucket))
        taken += len(added)
        if taken > MOST_SETTINGS:
            return Expansion((), (), (), (), crowded=added[-1])
        including.update(added)
        cells.append(Cell((names[0], names[1], names[2]), added))
    loose: list[int] = []
    own: dict[Names, int] = {}
    repeated: list[int] = []
    for entry in include:
        model, quantization, target = entry.names
        if entry.index in including:
            continue
        if model is None or quantization is None or target is None:
            loose.append(entry.index)
        elif (model, quantization, target) in own:
            repeated.append(entry.index)
        else:
            own[model, quantization, target] = entry.index
    cells.extend(Cell(names, (index,)) for names, index in own.items())
    idle = tuple(entry.index for entry in exclude if entry.index not in excluding)
    return Expansion(tuple(cells), idle, tuple(loose), tuple(repeated))


class _Index:
    """Entries by which axes they name and how: a combination is looked up once for each set of axes."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.tables: dict[tuple[bool, ...], dict[tuple[str, ...], list[int]]] = {}
        for entry in entries:
            table = self.tables.setdefault(entry.mask, defaultdict(list))
            table[tuple(name for name in entry.names if name is not None)].append(entry.index)

    def matching(self, names: Sequence[str]) -> list[list[int]]:
        """The entries that agree with a combination: one list for each set of axes that some name."""
        keys = ((table, tuple(compress(names, mask))) for mask, table in self.tables.items())
        return [table[key] for table, key in keys if key in table]
