"""Tests of the interface of compiled libraries that builder and runtime share: the order of arguments, and
that no other file repeats its names."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from mlcbuild_format import abi

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = [value for value in vars(abi).values() if isinstance(value, abi.Function)]


def test_a_call_is_put_into_the_order_of_the_arguments() -> None:
    values = {name: number for number, name in enumerate(reversed(abi.STEP.names))}
    assert abi.STEP.ordered(values) == sorted(values.values(), reverse=True)
    assert abi.STEP.index("logit_positions") == 1


def test_a_call_with_wrong_names_is_refused() -> None:
    values = dict.fromkeys(abi.STEP_PREFILL.names, 0)
    with pytest.raises(ValueError, match="step_prefill has no argument forks"):
        abi.STEP_PREFILL.ordered({**values, "forks": 0})
    del values["masks"]
    with pytest.raises(KeyError, match="masks"):
        abi.STEP_PREFILL.ordered(values)


def test_names_are_unique_and_each_function_belongs_to_a_capability() -> None:
    assert len({function.name for function in FUNCTIONS}) == len(FUNCTIONS)
    for function in FUNCTIONS:
        assert len(set(function.names)) == len(function.names)
    capable = [function for functions in abi.CAPABILITIES.values() for function in functions]
    assert sorted(function.name for function in capable) == sorted(function.name for function in FUNCTIONS)


def test_the_random_number_is_the_last_column() -> None:
    """Checks that the random number is the last of the sampling parameters, because runtimes append it to
    those that a request fixes."""
    assert abi.SAMPLING_COLUMNS[-1] == "random"
    assert len(abi.SKIP) == len(abi.SAMPLING_COLUMNS) and abi.SKIP.inverse_temperature < 0


def test_the_page_needs_the_standard_library_only() -> None:
    for name in ("abi", "versions"):
        tree = ast.parse((ROOT / "runtime" / "mlcbuild_format" / f"{name}.py").read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module in sys.stdlib_module_names or node.module in {"collections.abc"}
            assert not isinstance(node, ast.Import)


@pytest.mark.parametrize(
    "text", ["mlcbuild-library/2", "mlcbuild-weights/1", "batch_prefill_to_last_hidden_states"]
)
def test_names_stand_in_one_place(text: str) -> None:
    places = [
        path.name
        for package in ("mlcbuild", "runtime/mlcbuild_format", "runtime/mlcbuild_runtime")
        for path in (ROOT / package).rglob("*.py")
        if text in path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Constant) and node.value == text
    ]
    assert len(places) == 1, places
