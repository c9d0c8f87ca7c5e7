"""Tests that compare the browser's check of GPU programs with the one in Python, on valid and on mutated
programs."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from mlcbuild_format.fields import FieldError, parse_json
from mlcbuild_format.program import FEATURES, check
from mlcbuild_format.program_json import parse, to_json
from mlcbuild_format.signature import signature

from tests.runtime.browser_engine import call
from tests.test_program import PROGRAM, REFUSED, changed, mutated

PAGES = 32
STRICTER = r"too large|more than \d+ digits|must hold|duplicate|there twice|nested too deeply|surrogate|UTF-8"
"""Regular expression for reasons to refuse a GPU program that Python's check reports and the one in
JavaScript does not: they concern JSON syntax, or numbers that JavaScript cannot represent."""


def outcomes(documents: list[str]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = call("programs", {"documents": documents, "pages": PAGES})
    return results


def test_a_whole_program_is_read_as_in_python() -> None:
    (result,) = outcomes([json.dumps(to_json(PROGRAM))])
    assert result["signature"] == signature(PROGRAM.params)
    for features, files in zip((FEATURES, ["subgroups"], []), result["files"], strict=True):
        assert files == [kernel.file for kernel in PROGRAM.for_device(features).kernels.values()]
    assert result["bytes"] == {**PROGRAM.param_bytes(), **PROGRAM.buffer_bytes(PAGES)}


def test_what_python_refuses_is_refused_in_one_sentence() -> None:
    for result in outcomes([json.dumps(changed(change)) for change, _ in REFUSED]):
        assert "\n" not in result["error"]


@pytest.mark.parametrize("seed", range(4))
def test_mutated_programs_are_refused_or_read_as_in_python(seed: int) -> None:
    rng, documents = random.Random(seed), list[Any]()
    while len(documents) < 100:
        try:
            documents.append(mutated(rng))
        except ValueError:  # no JSON
            continue
    accepted = 0
    for document, result in zip(
        documents, outcomes([json.dumps(mutation) for mutation in documents]), strict=True
    ):
        try:
            program = parse(parse_json(json.dumps(document).encode()))
            check(program, PAGES)
        except (FieldError, ValueError) as error:
            assert "error" in result, (str(error), document)
            continue
        accepted += 1
        if "error" in result:
            assert re.search(STRICTER, result["error"]), (result, document)
        else:
            assert result["bytes"] == {**program.param_bytes(), **program.buffer_bytes(PAGES)}
    assert accepted > 5
