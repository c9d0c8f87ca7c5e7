"""The `matrix` section: what a recipe builds, and that everything in it is of use."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from mlcbuild.documents.document import Where
from mlcbuild.errors import did_you_mean
from mlcbuild.recipe.matrix import AXES, MOST_SETTINGS, Cell, Entry, Expansion, Names, expand
from mlcbuild.recipe.reading import Reading

LARGEST = 100_000
"""Combinations of a product: more are a mistake, and would take minutes to plan."""

_SECTIONS = {"model": "models", "quantization": "quantizations", "target": "targets"}


def read_cells(reading: Reading) -> tuple[Cell, ...]:
    """The combinations to build. Reports names that are unknown, of no use or not distinct.

    There are none when a section is so wrong that its names cannot be told.
    """
    places = {axis: _places(reading, section) for axis, section in _SECTIONS.items()}
    axes = [_axis(reading, axis, places[axis]) for axis in AXES]
    exclude, include = (_entries(reading, key, places) for key in ("exclude", "include"))
    if not all(places.values()):
        return ()
    size = prod(len(names) for names in axes)
    if size > LARGEST:
        reading.report(
            ("matrix",), f"the matrix has {size} combinations; at most {LARGEST} are allowed", True
        )
        return ()
    expansion = expand(axes, exclude, include)
    if expansion.crowded is not None:
        message = (
            f"with this entry, combinations take settings from include entries more than {MOST_SETTINGS} "
            "times; set what holds for all of them under 'compile' and 'verify'"
        )
        reading.report(("matrix", "include", expansion.crowded), message)
        return ()
    _report_entries(reading, expansion)
    if not expansion.cells:
        if not reading.problems:
            reading.report(("matrix",), "the matrix is empty: nothing would be built", on_key=True)
        return ()
    if not expansion.loose:
        _report_unused(reading, expansion, places)
    return _distinct(reading, expansion.cells, places["model"])


def _places(reading: Reading, section: str) -> dict[str, Where]:
    """The names that a section defines, and where."""
    found: dict[str, Where] = {}
    for i in range(len(reading.items(section))):
        name = reading.text(section, i)
        if name is not None:
            found[name] = (section, i)
    for name in reading.mapping(section):
        if (section, name) not in reading.bad_keys:
            found[name] = (section, name)
    return found


def _axis(reading: Reading, axis: str, places: Mapping[str, Where]) -> list[str]:
    """The names of one axis of the product: those that `matrix` lists, or all."""
    if not isinstance(reading.get("matrix", axis), list):
        return list(places)
    found = []
    for i in range(len(reading.items("matrix", axis))):
        name = _known(reading, axis, ("matrix", axis, i), places)
        if name is not None:
            found.append(name)
    return found


def _known(reading: Reading, axis: str, where: Where, places: Mapping[str, Where]) -> str | None:
    """The name at a place, None when it is none of this recipe's, which is reported where those are known."""
    name = reading.text(*where)
    if name is None or name in places or not places:
        return name
    reading.report(where, f"{axis} '{name}' is unknown in this recipe; {did_you_mean(name, places)}")
    return None


def _entries(reading: Reading, key: str, places: Mapping[str, Mapping[str, Where]]) -> list[Entry]:
    """The entries of exclude or include whose names are all known."""
    found = []
    for i in range(len(reading.items("matrix", key))):
        where: Where = ("matrix", key, i)
        given = [axis for axis in AXES if axis in reading.mapping(*where)]
        names = {axis: _known(reading, axis, (*where, axis), places[axis]) for axis in given}
        # An exclude entry without names would match everything; the schema reports it.
        if (given or key == "include") and None not in names.values():
            found.append(Entry(i, (names.get("model"), names.get("quantization"), names.get("target"))))
    return found


def _report_entries(reading: Reading, expansion: Expansion) -> None:
    for i in expansion.idle:
        reading.report(("matrix", "exclude", i), "this entry excludes nothing: no combination agrees with it")
    for i in expansion.loose:
        message = (
            "this entry agrees with no combination; to make one it must name model, quantization and target"
        )
        reading.report(("matrix", "include", i), message)
    for i in expansion.repeated:
        reading.report(("matrix", "include", i), "an earlier include entry makes this combination already")


def _report_unused(reading: Reading, expansion: Expansion, places: Mapping[str, Mapping[str, Where]]) -> None:
    for i, axis in enumerate(AXES):
        used = {cell.names[i] for cell in expansion.cells}
        for name, where in places[axis].items():
            if name not in used:
                reading.report(where, f"{axis} '{name}' is in no combination that is built", on_key=True)


def _distinct(reading: Reading, cells: tuple[Cell, ...], models: Mapping[str, Where]) -> tuple[Cell, ...]:
    """The cells whose variants have names of their own; `a-b` with `c` and `a` with `b-c` do not."""
    owners: dict[str, Names] = {}
    found = []
    for cell in cells:
        name = "-".join(cell.names)
        other = owners.setdefault(name, cell.names)
        if other == cell.names:
            found.append(cell)
            continue
        both = f"{'/'.join(other)} and {'/'.join(cell.names)}"
        message = f"{both} would both be called '{name}': rename a model, a quantization or a target"
        reading.report(models[cell.names[0]], message, on_key=True)
    return tuple(found)
