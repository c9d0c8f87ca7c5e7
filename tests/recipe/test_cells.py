"""Tests of the messages about faults in the section `matrix` of a recipe, each with its position."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes import HEAD, changed, faults, project

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
