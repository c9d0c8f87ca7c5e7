"""Tests that compare `include` and `exclude` of a matrix with an independent implementation of GitHub's
documented rules."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild.recipe.matrix import AXES, Cell, MatrixEntry, expand

Combination = dict[str, str]


def documented(
    axes: dict[str, list[str]], exclude: list[Combination], include: list[Combination]
) -> tuple[list[Combination], list[Combination]]:
    """Returns (combinations of the axes' values, combinations that `include` entries add), computed by
    GitHub's documented rules.

    The rules, from "Running variations of jobs in a workflow": an excluded configuration only has to be a
    partial match; all include combinations are processed after exclude; each is added to the original
    combinations whose original values it does not overwrite, may overwrite added values, and is a new
    combination if it can be added to none.
    """
    original = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    original = [
        combination
        for combination in original
        if not any(all(combination.get(key) == value for key, value in entry.items()) for entry in exclude)
    ]
    grown = [dict(combination) for combination in original]
    created: list[Combination] = []
    for entry in include:
        fits = [
            i
            for i, combination in enumerate(original)
            if all(combination[key] == value for key, value in entry.items() if key in combination)
        ]
        for i in fits:
            grown[i].update(entry)
        if not fits:
            created.append(dict(entry))
    return grown, created


def entries(inputs: list[Combination]) -> list[MatrixEntry]:
    return [
        MatrixEntry(i, (entry.get("model"), entry.get("quantization"), entry.get("target")))
        for i, entry in enumerate(inputs)
    ]


def settings(cell: Cell, include: list[Combination]) -> Combination:
    """Returns setting -> value for one cell (a combination that remains) of a recipe's matrix: the values of
    its axes, then those that its `include` entries set, in order. include: all `include` entries of the
    recipe."""
    actual = dict(zip(AXES, cell.names, strict=True))
    for i in cell.includes:
        actual.update(include[i])
    return actual


def agree(axes: dict[str, list[str]], exclude: list[Combination], include: list[Combination]) -> None:
    axes = {axis: axes[axis] for axis in AXES}
    grown, created = documented(axes, exclude, include)
    variants = expand(list(axes.values()), entries(exclude), entries(include))
    whole = [entry for entry in created if all(axis in entry for axis in AXES)]
    first = list({tuple(entry[axis] for axis in AXES): entry for entry in reversed(whole)}.values())[::-1]
    cells = [settings(cell, include) for cell in variants.cells]
    assert cells[: len(grown)] == grown
    assert sorted(map(_items, cells[len(grown) :])) == sorted(map(_items, first))
    # What GitHub would build otherwise is reported here.
    assert len(variants.loose) == len(created) - len(whole)
    assert len(variants.repeated) == len(whole) - len(first)
    assert [exclude[i] for i in variants.idle] == [
        entry
        for entry in exclude
        if not any(
            all(value == entry.get(key, value) for key, value in zip(axes, values, strict=True))
            for values in product(*axes.values())
        )
    ]


_AXES = st.fixed_dictionaries(
    {axis: st.lists(st.sampled_from("abc"), unique=True, max_size=3) for axis in AXES}
)
_ENTRY = st.fixed_dictionaries({}, optional={axis: st.sampled_from("abcd") for axis in AXES})
_INCLUDE = st.fixed_dictionaries(
    {},
    optional={
        **{axis: st.sampled_from("abcd") for axis in AXES},
        "x": st.sampled_from("12"),
        "y": st.sampled_from("12"),
    },
)


@given(_AXES, st.lists(_ENTRY.filter(bool), max_size=4), st.lists(_INCLUDE, max_size=5))
def test_agrees_with_the_documented_rules(
    axes: dict[str, list[str]], exclude: list[Combination], include: list[Combination]
) -> None:
    agree(axes, exclude, include)


def test_the_example_of_the_documentation() -> None:
    """Checks that a recipe's matrix expands as the example in GitHub's documentation of `include`, to which a
    third axis with one value was added."""
    axes = {"model": ["apple", "pear"], "quantization": ["cat", "dog"], "target": ["t"]}
    include = [
        {"color": "green"},
        {"color": "pink", "quantization": "cat"},
        {"model": "apple", "shape": "circle"},
        {"model": "banana"},
        {"model": "banana", "quantization": "cat"},
        {"model": "banana", "quantization": "cat", "target": "t"},
    ]
    variants = expand(list(axes.values()), [], entries(include))
    rest = {"target": "t"}
    assert [settings(cell, include) for cell in variants.cells] == [
        {"model": "apple", "quantization": "cat", "color": "pink", "shape": "circle", **rest},
        {"model": "apple", "quantization": "dog", "color": "green", "shape": "circle", **rest},
        {"model": "pear", "quantization": "cat", "color": "pink", **rest},
        {"model": "pear", "quantization": "dog", "color": "green", **rest},
        {"model": "banana", "quantization": "cat", "target": "t"},
    ]
    # A job may lack a value of the matrix; a bundle may not lack its quantization or target.
    assert variants.loose == (3, 4)
    agree(axes, [], include)


def test_include_brings_back_what_exclude_dropped() -> None:
    axes = {"model": ["a", "b"], "quantization": ["q"], "target": ["t"]}
    whole = {"model": "a", "quantization": "q", "target": "t"}
    variants = expand(list(axes.values()), entries([{"model": "a"}]), entries([{"x": "1"}, whole]))
    assert variants.cells == (Cell(("b", "q", "t"), (0,)), Cell(("a", "q", "t"), (1,)))


def test_an_exclude_hidden_by_another_is_not_idle() -> None:
    variants = expand(
        [["a"], ["q", "r"], ["t"]], entries([{"model": "a"}, {"quantization": "q"}, {"target": "u"}]), []
    )
    assert variants.cells == ()
    assert variants.idle == (2,)


@pytest.mark.parametrize("empty", range(3))
def test_an_empty_axis_leaves_only_includes(empty: int) -> None:
    axes = [["a"], ["q"], ["t"]]
    axes[empty] = []
    variants = expand(axes, [], entries([{"model": "a", "quantization": "q", "target": "t"}]))
    assert variants.cells == (Cell(("a", "q", "t"), (0,)),)


def _items(combination: Combination) -> list[tuple[str, str]]:
    return sorted(combination.items())
