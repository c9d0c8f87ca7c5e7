"""Tests of budgets in the quantizations of recipes: their names, and the messages about faults, each with its
position."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.recipe import expand
from mlcbuild.recipe.budgets import CANDIDATES, is_budget, listed_name, read_budget
from tests.recipes import changed, faults, project, read, reading, reported

__all__ = ["project"]

FAULTS: dict[str, tuple[str, list[str]]] = {
    "budgets": (
        changed(
            quantizations="{a: {}, b: {target_bits: 5, max_kl: 0.1}, c: {max_size: 8 apples}, "
            "d: {scheme: q4a8_1, max_kl: 0.1, candidates: [q0f32, q0f16]}}"
        ),
        [
            "3:20: 'a' needs the key 'scheme', or a budget: target_bits, max_size or max_kl",
            "3:44: 'max_kl' and 'target_bits' are two budgets; give each a quantization of its own",
            "3:72: 'max_size' must be a size such as 8GB or 512MiB, found '8 apples'",
            "3:103: 'max_kl' belongs to a budget, which chooses scheme and overrides itself; remove either",
            "3:116: 'candidates' belongs to a budget, which chooses scheme and overrides itself; remove "
            "either",
        ],
    ),
    "budgets in a list": (
        changed(
            quantizations="[{}, {max_kl: 0.1, max_size: 1MB}, {max_size: 8 apples}, {scheme: q4a8_1}, "
            "{max_kl: 0.2}, {max_kl: 0.2, candidates: [q0f32, q0f16]}]"
        ),
        [
            "3:17: a mapping in a list of quantizations needs a budget: target_bits, max_size or max_kl",
            "3:22: 'max_kl' and 'max_size' are two budgets; give each a quantization of its own",
            "3:62: 'max_size' must be a size such as 8GB or 512MiB, found '8 apples'",
            "3:74: 'scheme' needs a name in place of the list: write quantizations as a mapping of names "
            "to schemes",
            "3:106: an earlier budget is called 'max_kl-0.2', too: write quantizations as a mapping, which "
            "gives each a name of its own",
        ],
    ),
    "candidates of budgets": (
        changed(
            quantizations="{a: {target_bits: 0}, b: {max_kl: 0.1, candidates: [q4a8_1]}, "
            "c: {max_kl: 0.1, candidates: [q4a8_1, as-is, q4a81]}}"
        ),
        [
            "3:34: 'target_bits' must be at least 1, not 0",
            "3:67: a budget chooses among at least two candidates, found 1",
            "3:116: candidate 'as-is' is no built-in scheme; known: " + ", ".join(sorted(SCHEMES)),
            "3:123: candidate 'q4a81' is no built-in scheme; did you mean 'q4a8_1'?",
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected


def test_budgets_in_a_list_are_named_by_what_they_state(project: Path) -> None:
    text = changed(quantizations="[q8a8_1, {max_size: 800 MB}, {target_bits: 4.250}, {max_kl: '${kl}'}]")
    text += "vars: {kl: 0.02}\nmatrix: {exclude: [{quantization: max_kl-0.02, target: host}]}\n"
    listed = read(text.replace("[x86-64-v3]", "[x86-64-v3, host]"))
    assert list(listed.schemes) == ["q8a8_1", "max_size-800MB", "target_bits-4.25", "max_kl-0.02"]
    named = read(changed(quantizations="{a: {max_size: 800MB}, b: {target_bits: 4.25}, c: {max_kl: 0.02}}"))
    assert list(named.schemes.values()) == list(listed.schemes.values())[1:]
    assert len(expand(listed)) == 7


def test_a_quantization_without_scheme_and_overrides_is_a_budget() -> None:
    recipe = reading("q: {a: {max_kl: 1}, b: {scheme: q0f32}, c: {overrides: [], scheme: x}, d: {}}")
    assert [is_budget(recipe, ("q", name)) for name in "abcd"] == [True, False, False, True]
    assert reported(recipe) == [
        "1:75: 'd' needs the key 'scheme', or a budget: target_bits, max_size or max_kl"
    ]


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ("q4a8_1", "q4a8_1"),
        ("{max_size: 1 GiB}", "max_size-1GiB"),
        ("{max_size: 1 apple}", None),
        ("{target_bits: 4}", "target_bits-4"),
        ("{max_kl: 0.020}", "max_kl-0.02"),
        ("{candidates: [q0f32]}", None),
        ("{max_kl: []}", None),
    ],
)
def test_the_name_of_an_item(item: str, name: str | None) -> None:
    assert listed_name(reading(f"q: [{item}]"), ("q", 0)) == name


def test_a_budget_lists_its_candidates_from_the_smallest() -> None:
    recipe = reading(
        "q: [{max_size: 1MB, candidates: [q8a8_1, q0f32, q4a8_1]}, {max_size: 1 MB, candidates: [q4a8_1, "
        "q8a8_1, q0f32]}, {max_kl: 0.5}, {target_bits: 5, candidates: [q8a8_1, q4a8_2]}]"
    )
    first, same, usual, bits = (read_budget(recipe, ("q", i)) for i in range(4))
    assert first is not None and first == same
    assert first.budget is not None and (first.budget.kind, first.budget.limit) == ("max_size", 1e6)
    names = [scheme.name for scheme in first.candidates]
    assert names == ["q4a8_1", "q8a8_1", "q0f32"], "4, 8 and 32 bits"
    assert first.format == SCHEMES["q0f32"].format, "that of the largest candidate bounds the size"
    assert usual is not None and usual.budget is not None and usual.budget.limit == 0.5
    assert {scheme.name for scheme in usual.candidates} == {*CANDIDATES}
    assert bits is not None and bits.activation_bits == 8
    assert len({first.name, usual.name, bits.name}) == 3 and not reported(recipe)
