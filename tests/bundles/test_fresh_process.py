"""Tests of running a bundle in a separate process: its result, its output, and the error message for a
process that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mlcbuild import progress
from mlcbuild.bundles import fresh_process
from mlcbuild.errors import VerificationError

WORK = """\
import os, signal, sys, time
from mlcbuild import progress
from mlcbuild.bundles import fresh_process
from mlcbuild_format.errors import BundleError


def work(how, *more):
    print("a line of the library")
    if how == "sentence":
        raise BundleError("the bundle is damaged")
    if how == "exit":
        sys.exit("its logits are not finite")
    if how == "busy":
        progress.report(3, 12, "tokens")
        while not os.path.exists(more[0]):
            time.sleep(0.01)
    if how == "silent":
        os._exit(7)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"how": how, "more": list(more), "compiler": "tvm" in sys.modules}


if __name__ == "__main__":
    fresh_process.main(work)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_work.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return "some_work"


def test_the_result_comes_back_and_output_goes_to_the_log(
    module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = fresh_process.run(module, "well", "1", "é")
    assert result == {"how": "well", "more": ["1", "é"], "compiler": False}
    assert capfd.readouterr().out == "a line of the library\n"


def test_progress_is_passed_on(module: str, tmp_path: Path) -> None:
    reports: list[Any] = []

    def listen(*report: Any) -> None:
        reports.append(report)
        (tmp_path / "heard").touch()

    progress.listen(listen)
    try:
        fresh_process.run(module, "busy", str(tmp_path / "heard"))
    finally:
        progress.listen(None)
    assert reports[0] == (3, 12, "tokens")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("sentence", "the bundle is damaged"),
        ("exit", "its logits are not finite"),
        ("silent", "exit code 7, no reason given"),
        ("killed", "the process was ended by SIGKILL"),
    ],
)
def test_a_failure_is_one_sentence(module: str, how: str, why: str) -> None:
    with pytest.raises(VerificationError) as caught:
        fresh_process.run(module, how)
    assert str(caught.value) == f"the bundle could not be run: {why}"
