"""Reads the `matrix` section of a recipe: the combinations of model, quantization and target to build, none
if the recipe defines no valid name for one of these. Unknown or unused names, and entries without any effect,
are added to the recipe's list of problems, not raised."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from mlcbuild.documents.document import Where
from mlcbuild.errors import did_you_mean
from mlcbuild.recipe.budgets import listed_name
from mlcbuild.recipe.matrix import AXES, MOST_SETTINGS, Cell, Expansion, MatrixEntry, Names, expand
from mlcbuild.recipe.reading import Reading

LARGEST = 100_000
"""Maximum number of combinations of model, quantization and target that a recipe's matrix may have. More are
a problem of the recipe, since they are a mistake and would take minutes to plan."""

_SECTIONS = {"model": "models", "quantization": "quantizations", "target": "targets"}


def read_cells(reading: Reading) -> tuple[Cell, ...]:
    """Returns the combinations of model, quantization and target that a recipe builds. reading: the recipe's
    data and problems; names that are unknown, unused or ambiguous, and `include` and `exclude` entries
    without effect, become problems of the recipe. More than 1000 problems raise InputError.

    Returns () if a section is too malformed to list its names, if nothing would be built, and if there are
    too many combinations, or too many pairs of a combination and an `include` entry that applies to it."""
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
    """Returns name -> path in the recipe, such as ("models", "a"), for the valid names that a section of the
    recipe defines; invalid ones are left out without a problem, since other checks report them. section:
    "models", "quantizations" or "targets"."""
    places: dict[str, Where] = {}
    for i in range(len(reading.items(section))):
        name = listed_name(reading, (section, i))
        if name is not None:
            places[name] = (section, i)
    for name in reading.mapping(section):
        if (section, name) not in reading.bad_keys:
            places[name] = (section, name)
    return places


def _axis(reading: Reading, axis: str, places: Mapping[str, Where]) -> list[str]:
    """Returns the names of models, quantizations or targets that are combined: those that the recipe's
    `matrix` lists, without unknown ones, which become problems of the recipe, or all that it defines. axis:
    "model", "quantization" or "target"; places: name -> path of its definition in the recipe."""
    if not isinstance(reading.get("matrix", axis), list):
        return list(places)
    names = []
    for i in range(len(reading.items("matrix", axis))):
        name = _defined_name(reading, axis, ("matrix", axis, i), places)
        if name is not None:
            names.append(name)
    return names


def _defined_name(reading: Reading, axis: str, where: Where, places: Mapping[str, Where]) -> str | None:
    """Returns the name of a model, quantization or target that stands at the path `where` of a recipe.
    Returns None, with a problem added to the recipe's list, if the recipe does not define the name, and None
    if there is no text at the path. places: defined name -> path of its definition; if it is empty, every
    name is returned."""
    name = reading.text(*where)
    if name is None or name in places or not places:
        return name
    reading.report(where, f"{axis} '{name}' is unknown in this recipe; {did_you_mean(name, places)}")
    return None


def _entries(reading: Reading, key: str, places: Mapping[str, Mapping[str, Where]]) -> list[MatrixEntry]:
    """Returns the entries of the recipe's `matrix` under `key`, "exclude" or "include", whose names are all
    defined: the index and the names of each. Unknown names become problems of the recipe. An `exclude` entry
    that names nothing is left out, since the JSON schema reports it; such an `include` entry stays. places:
    "model", "quantization" or "target" -> name -> path of its definition."""
    entries = []
    for i in range(len(reading.items("matrix", key))):
        where: Where = ("matrix", key, i)
        axes = [axis for axis in AXES if axis in reading.mapping(*where)]
        names = {axis: _defined_name(reading, axis, (*where, axis), places[axis]) for axis in axes}
        # An exclude entry without names would match everything; the schema reports it.
        if (axes or key == "include") and None not in names.values():
            entries.append(
                MatrixEntry(i, (names.get("model"), names.get("quantization"), names.get("target")))
            )
    return entries


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
    """Returns those of `cells`, combinations of model, quantization and target, whose variants have unique
    names; of several with one name, the first. For each of the others a problem is added to the recipe's
    list: model `a-b` with quantization `c` has the name of `a` with `b-c`. models: name -> path of its
    definition."""
    owners: dict[str, Names] = {}
    unique_cells = []
    for cell in cells:
        name = "-".join(cell.names)
        other = owners.setdefault(name, cell.names)
        if other == cell.names:
            unique_cells.append(cell)
            continue
        both = f"{'/'.join(other)} and {'/'.join(cell.names)}"
        message = f"{both} would both be called '{name}': rename a model, a quantization or a target"
        reading.report(models[cell.names[0]], message, on_key=True)
    return tuple(unique_cells)
