"""Tests of the question whether this machine can run GPU bundles, which a child process answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mlcbuild.targets import gpus


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    gpus.why_not.cache_clear()
    yield
    gpus.why_not.cache_clear()


def child(code: int, out: bytes) -> Callable[..., Any]:
    def run(command: list[str], **options: Any) -> Any:
        assert command[0] == sys.executable and options["stderr"] == subprocess.DEVNULL
        return SimpleNamespace(returncode=code, stdout=out)

    return run


def late(command: list[str], **options: Any) -> Any:
    raise subprocess.TimeoutExpired(command, options["timeout"])


NONE = "this machine has no GPU adapter (Vulkan, Metal or D3D12)"


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (child(0, b"1\n"), None),
        (child(0, b"2"), None),
        (child(0, b"0\n"), NONE),
        (child(0, b"a driver prints"), NONE),
        (child(-11, b"1\n"), NONE),
        (late, "this machine's GPU driver does not answer"),
    ],
)
def test_a_driver_may_crash_hang_and_print(
    run: Callable[..., Any], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda _: object())
    monkeypatch.setattr(gpus, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
    assert gpus.why_not() == why
    monkeypatch.setattr(gpus, "subprocess", None)
    assert gpus.why_not() == why, "it is tested once"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda _: None)
    assert "pip install 'mlcbuild-runtime[gpu]'" in (gpus.why_not() or "")
