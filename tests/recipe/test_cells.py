"""Tests of reading the section `matrix` of a recipe, and of the messages about its faults, each with its
position."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.recipe import cells
from mlcbuild.recipe.cells import read_cells
from mlcbuild.recipe.matrix import Cell
from tests.recipes import HEAD, changed, faults, project, reading, reported

__all__ = ["project"]

FAULTS: dict[str, tuple[str, list[str]]] = {
    "unknown names in the matrix": (
        HEAD + "matrix:\n  model: [tiyn]\n  exclude: [{target: x86-64-v4}]\n"
        "  include: [{quantization: q4}]\n",
        [
            "6:11: model 'tiyn' is unknown in this recipe; did you mean 'tiny'?",
            "7:22: target 'x86-64-v4' is unknown in this recipe; did you mean 'x86-64-v3'?",
            "8:28: quantization 'q4' is unknown in this recipe; known: q4f16_1",
        ],
    ),
    "unknown axis": (
        HEAD + "matrix: {exclude: [{modle: tiny}]}\n",
        ["5:21: the key 'modle' is unknown in item 1 of 'exclude'; did you mean 'model'?"],
    ),
    "empty entries": (
        HEAD + "matrix: {exclude: [{}], include: [{}]}\n",
        ["5:20: item 1 of 'exclude' must not be empty", "5:35: item 1 of 'include' must not be empty"],
    ),
    "exclude that matches nothing": (
        changed(models="{a: models/tiny, b: models/other}", quantizations="[q0f32, q0f16]")
        + "matrix:\n  model: [a]\n  exclude:\n    - {model: b}\n    - {model: a, quantization: q0f32}\n"
        "  include: [{model: b, quantization: q0f32, target: x86-64-v3}]\n",
        ["8:7: this entry excludes nothing: no combination agrees with it"],
    ),
    "include that makes nothing": (
        changed(models="{a: models/tiny, b: models/other}")
        + "matrix: {model: [a], include: [{model: b, compile: {max_batch: 2}}]}\n",
        [
            "5:32: this entry agrees with no combination; to make one it must name model, quantization and "
            "target"
        ],
    ),
    "combination made twice": (
        changed(models="{a: models/tiny, b: models/other}")
        + "matrix:\n  model: [a]\n  include:\n"
        + 2 * "    - {model: b, quantization: q4f16_1, target: x86-64-v3}\n",
        ["9:7: an earlier include entry makes this combination already"],
    ),
    "name twice on an axis": (
        HEAD + "matrix: {model: [tiny, tiny]}\n",
        ["5:24: 'tiny' appears twice in 'model': it is item 1 too"],
    ),
    "matrix of a million": (
        changed(
            models=f"{{{', '.join(f'm{i}: models/tiny' for i in range(500))}}}",
            quantizations=f"{{{', '.join(f'q{i}: q0f32' for i in range(100))}}}",
            targets=f"{{{', '.join(f't{i}: x86-64-v2' for i in range(20))}}}",
        )
        + "matrix: {}\n",
        ["5:1: the matrix has 1000000 combinations; at most 100000 are allowed"],
    ),
    "empty matrix": (
        HEAD + "matrix: {exclude: [{model: tiny}]}\n",
        ["5:1: the matrix is empty: nothing would be built"],
    ),
    "names of no use": (
        changed(models="{a: models/tiny, b: models/other}", quantizations="[q0f32, q0f16]")
        + "matrix:\n  exclude: [{model: b}, {quantization: q0f16}]\n",
        [
            "2:26: model 'b' is in no combination that is built",
            "3:24: quantization 'q0f16' is in no combination that is built",
        ],
    ),
    "same names of variants": (
        changed(models="{a-b: models/tiny, a: models/other}", quantizations="{c: q0f32, b-c: q0f32}")
        + "bundle: {output: 'dist/{model}/{quantization}/{target}'}\n",
        [
            "2:28: a-b/c/x86-64-v3 and a/b-c/x86-64-v3 would both be called 'a-b-c-x86-64-v3': "
            "rename a model, a quantization or a target"
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected


AXES = "models: {a: x, b: y}\nquantizations: [q, {max_kl: 0.5}]\ntargets: [t]\n"


def test_without_a_matrix_everything_is_combined() -> None:
    recipe = reading(AXES)
    names = ("q", "max_kl-0.5")
    assert read_cells(recipe) == tuple(Cell((model, name, "t")) for model in "ab" for name in names)
    assert not reported(recipe)


def test_a_matrix_chooses_names_and_has_exceptions() -> None:
    recipe = reading(
        f"{AXES}matrix:\n  model: [b, a, c]\n  exclude: [{{model: a, quantization: max_kl-0.5}}]\n"
        "  include: [{quantization: q}, {model: b, target: t}, {model: d, target: t}]\n"
    )
    assert read_cells(recipe) == (
        Cell(("b", "q", "t"), (0, 1)),
        Cell(("b", "max_kl-0.5", "t"), (1,)),
        Cell(("a", "q", "t"), (0,)),
    )
    assert [problem.split(";")[0] for problem in reported(recipe)] == [
        "5:17: model 'c' is unknown in this recipe",
        "7:63: model 'd' is unknown in this recipe",
    ]


def test_a_section_without_names_has_no_combinations_and_no_problem_of_its_own() -> None:
    recipe = reading("models: {a: x}\nquantizations: 5\ntargets: [t]\nmatrix: {exclude: [{model: a}]}")
    assert read_cells(recipe) == ()
    assert reported(recipe) == []


def test_the_number_of_combinations_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "LARGEST", 4)
    assert len(read_cells(reading(AXES))) == 4
    monkeypatch.setattr(cells, "LARGEST", 3)
    recipe = reading(f"{AXES}matrix: {{}}")
    assert read_cells(recipe) == ()
    assert reported(recipe) == ["4:1: the matrix has 4 combinations; at most 3 are allowed"]
