"""Tests of reading the section `publish` of a recipe, and of the messages about its faults, each with its
position."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.recipe.destinations import read_destinations
from tests.recipes import HEAD, changed, faults, project, reading, reported

__all__ = ["project"]

FAULTS: dict[str, tuple[str, list[str]]] = {
    "wrong destinations": (
        HEAD + "publish:\n  - {to: ftp://x}\n  - {to: 'oci://host/{modell}:v1'}\n  - {to: 'oci://host/x'}\n"
        "  - {to: 'oci://host/x:{model}'}\n  - {to: 'oci://host/x:{model}'}\n  - {}\n",
        [
            "6:10: 'ftp://x' must start with oci:// (a registry) or hf:// (a model hub)",
            "7:10: the placeholder '{modell}' is unknown; did you mean 'model'?",
            "8:10: 'oci://host/x' lacks a tag: add ':' and one",
            "10:10: 'oci://host/x:{model}' is named twice",
            "11:5: item 6 of 'publish' lacks the key 'to': oci://host/repository:tag (an artifact of a "
            "registry) or hf://organisation/name@branch (a repository of a model hub)",
        ],
    ),
    "one destination for two": (
        changed(quantizations="[q4f16_1, q0f32]") + "publish: [{to: 'hf://team/{model}'}]\n",
        [
            "5:16: tiny/q4f16_1/x86-64-v3 and tiny/q0f32/x86-64-v3 would both be 'hf://team/tiny'; use "
            "{model}, {quantization} and {target} in it",
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected


CELLS = [("a", "q", "t"), ("b", "q", "t")]


def test_templates_that_tell_combinations_apart_are_read_in_order() -> None:
    recipe = reading(
        "publish:\n  - {to: 'hf://team/{model}'}\n  - {to: 'oci://host/x:{target}'}\n  - {to: 'hf://team/{size}'}\n"
        "  - {to: 'oci://host/x:{model}-{target}'}\n  - {to: 'hf://team/{model}'}\n"
    )
    assert read_destinations(recipe, CELLS) == ("hf://team/{model}", "oci://host/x:{model}-{target}")
    problems = reported(recipe)
    assert [problem.partition(":")[0] for problem in problems] == ["3", "4", "6"]
    assert "a/q/t and b/q/t would both be 'oci://host/x:t'" in problems[0]
    assert read_destinations(reading("publish: [{to: 'oci://host/x:{target}'}]"), CELLS[:1]) == (
        "oci://host/x:{target}",
    )
