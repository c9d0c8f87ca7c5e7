"""Tests of how the outcome of a run follows from the outcomes of its steps."""

from __future__ import annotations

import pytest

from mlcbuild.build.events import RunResult, Status, StepResult, Warned, silent
from mlcbuild.errors import MlcbuildError, StepError, StoreError


def step(status: Status, error: MlcbuildError | None = None) -> StepResult:
    return StepResult("a", status, error=error)


@pytest.mark.parametrize(
    ("steps", "ok", "code"),
    [
        ([], True, 0),
        ([step("built"), step("reused")], True, 0),
        ([step("built"), step("skipped")], False, 0),
        ([step("failed", StepError("a")), step("failed", StoreError("b"))], False, StepError.exit_code),
        ([step("skipped"), step("failed", StoreError("b"))], False, StoreError.exit_code),
    ],
)
def test_a_run_ends_as_its_first_failed_step(steps: list[StepResult], ok: bool, code: int) -> None:
    result = RunResult(tuple(steps), 1.0)
    assert (result.ok, result.exit_code) == (ok, code)


def test_an_interrupted_run_is_not_ok() -> None:
    result = RunResult((step("built"),), 1.0, interrupted="SIGINT")
    assert not result.ok and result.exit_code == 130


def test_steps_are_counted_by_status() -> None:
    result = RunResult((step("built"), step("reused"), step("built")), 1.0)
    assert [result.count(status) for status in ("built", "reused", "failed")] == [2, 1, 0]


def test_nothing_happens_without_a_reporter() -> None:
    silent(Warned("a"))
