"""Computes the combinations of model, quantization and target that a recipe builds, from names only.

The rules are those of a GitHub Actions matrix ("Running variations of jobs in a workflow", include and
exclude): exclusions apply to all combinations of the listed names. Then each include entry, in order, is
merged into every such combination with the names that it states; if there is none and it names all three, it
adds a separate combination, which later entries do not extend.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, product
from typing import TypeAlias

AXES = ("model", "quantization", "target")

Names: TypeAlias = tuple[str, str, str]
"""The names of one combination: (model, quantization, target)."""

MOST_SETTINGS = 1_000_000
"""Maximum number of pairs (combination of model, quantization and target, `include` entry of the recipe's
matrix that applies to it)."""


@dataclass(frozen=True)
class MatrixEntry:
    """One entry of `exclude` or `include` in a recipe's matrix: its index in that list, and for each of
    model, quantization and target a name, or None if the entry does not name it."""

    index: int
    names: tuple[str | None, str | None, str | None]

    @property
    def mask(self) -> tuple[bool, ...]:
        return tuple(name is not None for name in self.names)


@dataclass(frozen=True)
class Cell:
    """One combination of model, quantization and target, with the indices of the include entries of the
    recipe's matrix that apply to it, in order."""

    names: Names
    includes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Expansion:
    """The combinations of model, quantization and target that a recipe's matrix describes, and the indices of
    its `include` and `exclude` entries that have no effect."""

    cells: tuple[Cell, ...]
    idle: tuple[int, ...]
    """Indices of exclude entries that match no combination of the models, quantizations and targets that the
    matrix combines."""
    loose: tuple[int, ...]
    """Indices of include entries that match no combination and cannot add one, because they do not name
    model, quantization and target.
    """
    repeated: tuple[int, ...]
    """Indices of include entries that name the combination which an earlier include entry already added."""
    crowded: int | None = None
    """Index of the `include` entry at which the number of pairs (combination, `include` entry) exceeds the
    maximum; the other fields of this result are then empty. None if the maximum is not exceeded.
    """


def expand(
    axes: Sequence[Sequence[str]], exclude: Sequence[MatrixEntry], include: Sequence[MatrixEntry]
) -> Expansion:
    """Applies the exclude and include entries of a recipe's matrix to all combinations of the names in `axes`
    (models, quantizations, targets), and returns the combinations that remain, in the order of the names,
    then those that include entries add; also the indices of entries without effect. If include entries apply
    to combinations more than 1,000,000 times in total, returns only the index of the entry that exceeds this.

    The time is linear in the combinations, the entries, and the pairs of a combination and an entry that
    applies to it.
    """
    excludes, includes = _Index(exclude), _Index(include)
    excluding: set[int] = set()
    including: set[int] = set()
    cells: list[Cell] = []
    settings_count = 0
    for names in product(*axes):
        hits = excludes.matching(names)
        if hits:
            for bucket in hits:
                excluding.update(bucket)
                bucket.clear()  # An excluded combination stays excluded, but further entries may match it.
            continue
        added = tuple(sorted(index for bucket in includes.matching(names) for index in bucket))
        settings_count += len(added)
        if settings_count > MOST_SETTINGS:
            return Expansion((), (), (), (), crowded=added[-1])
        including.update(added)
        cells.append(Cell((names[0], names[1], names[2]), added))
    added_cells, loose, repeated = _beyond_product(
        [entry for entry in include if entry.index not in including]
    )
    idle = tuple(entry.index for entry in exclude if entry.index not in excluding)
    return Expansion((*cells, *added_cells), idle, loose, repeated)


def _beyond_product(include: Iterable[MatrixEntry]) -> tuple[list[Cell], tuple[int, ...], tuple[int, ...]]:
    """Evaluates `include` entries, in order, that match none of the combinations which the `exclude` entries
    of a recipe's matrix leave. Returns (combinations that they add, indices of entries that add none because
    they do not name all three, indices of entries that repeat an added combination)."""
    loose: list[int] = []
    repeated: list[int] = []
    entry_of_cell: dict[Names, int] = {}
    for entry in include:
        model, quantization, target = entry.names
        if model is None or quantization is None or target is None:
            loose.append(entry.index)
        elif (model, quantization, target) in entry_of_cell:
            repeated.append(entry.index)
        else:
            entry_of_cell[model, quantization, target] = entry.index
    return [Cell(names, (index,)) for names, index in entry_of_cell.items()], tuple(loose), tuple(repeated)


class _Index:
    """An index of the include or exclude entries of a matrix. Entries that name the same of model,
    quantization and target (such as all that name only a model) share one table, so that matching a
    combination takes one look-up for each table."""

    def __init__(self, entries: Sequence[MatrixEntry]) -> None:
        self.tables: dict[tuple[bool, ...], dict[tuple[str, ...], list[int]]] = {}
        for entry in entries:
            table = self.tables.setdefault(entry.mask, defaultdict(list))
            table[tuple(name for name in entry.names if name is not None)].append(entry.index)

    def matching(self, names: Sequence[str]) -> list[list[int]]:
        """Returns the indices of the include or exclude entries that match a combination. An entry names a
        model, a quantization, a target, or several of these, and matches if all of them occur in the
        combination. The result has one list for entries that name only a model, one for those that name a
        model and a target, and so on; lists without a match are absent. The lists are those of the index
        itself: if the caller empties one, its entries match no combination any more. names: (model,
        quantization, target) of the combination."""
        keys = ((table, tuple(compress(names, mask))) for mask, table in self.tables.items())
        return [table[key] for table, key in keys if key in table]
