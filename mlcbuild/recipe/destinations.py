"""Reads the `publish` section of a recipe: the addresses to which `mlcbuild publish` uploads bundles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlcbuild.bundles.publish import fault
from mlcbuild.documents.document import Where
from mlcbuild.recipe.matrix import Names
from mlcbuild.recipe.outputs import check_placeholders, render
from mlcbuild.recipe.reading import Reading


def read_destinations(reading: Reading, cells: Iterable[Names]) -> tuple[str, ...]:
    """Returns the valid address templates of a recipe's `publish` section, such as
    "oci://host/name:{model}-{target}", in order. Invalid ones, repetitions of an earlier one, and those that
    give two bundles one address, are left out and become problems of the recipe. cells: (model, quantization,
    target) of each bundle."""
    templates: list[str] = []
    listed: Sequence[Names] = list(cells)
    for index in range(len(reading.items("publish"))):
        where: Where = ("publish", index, "to")
        text = reading.text(*where)
        if text is None or not check_placeholders(reading, where, text):
            continue
        if text in templates:
            reading.report(where, f"'{text}' is named twice")
        elif _check(reading, where, text, listed):
            templates.append(text)
    return tuple(templates)


def _check(reading: Reading, where: Where, template: str, cells: Sequence[Names]) -> bool:
    """Returns True if an address template gives each bundle a different address to which it can be published;
    otherwise adds a problem to the recipe's list. cells: (model, quantization, target) of each bundle; where:
    path of the template in the recipe."""
    by_place: dict[str, Names] = {}
    for names in cells:
        place = render(template, names)
        if problem := fault(place, writing=True):
            reading.report(where, problem)
            return False
        if place in by_place:
            reading.report(
                where,
                f"{'/'.join(by_place[place])} and {'/'.join(names)} would both be '{place}'; "
                "use {model}, {quantization} and {target} in it",
            )
            return False
        by_place[place] = names
    return True
