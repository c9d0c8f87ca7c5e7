"""Tests that run `ci/bench/fuzz` briefly, and that repeat the cases in which it has found faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import compiler_process
from tests.conftest import ROOT
from tests.forkserver import PRELOADED, ForkServer
from tests.runtime import shared

SCRIPT = ROOT / "ci" / "bench" / "fuzz"
pytestmark = pytest.mark.xdist_group("fuzz")  # so that one process imports the modules of all targets
SAVED = ROOT / "tests" / "fuzz_cases"
CASES = {
    "recipes": 50,
    "records": 500,
    "stores": 20,
    "manifests": 30,
    "safetensors": 150,
    "configs": 300,
    "ggufs": 30,
    "pickles": 60,
    "quantized": 40,
    "adapters": 60,
    "programs": 300,
    "archives": 20,
    "answers": 25,
    "requests": 40,
    "bodies": 120,
}
"""Name of a file reader that is fuzzed -> number of random cases. The numbers are chosen so that each reader
takes one or two seconds."""


Fuzz = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Fuzz]:
    """Yields a function that runs `ci/bench/fuzz` with its arguments, in a process that is forked from one
    which has imported the modules of all targets."""
    server = ForkServer(preloaded=(*PRELOADED, "tests.fuzz_script"))

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])}
        return server.run("tests.fuzz_script", [str(argument) for argument in arguments], ROOT, environment)

    yield run
    server.close()


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the toy bundle (a trivial model whose answers follow from a formula), which
    the runtime's tests use, too. Tests must not change it."""
    return shared.once(
        tmp_path_factory, "toy", lambda out: compiler_process.run_program("tests.runtime.toy", str(out))
    )


@pytest.mark.parametrize("target", CASES)
def test_a_little_fuzzing_finds_nothing(target: str, fuzz: Fuzz, toy_bundle: Path, tmp_path: Path) -> None:
    cases = str(CASES[target])
    result = fuzz("--toy", toy_bundle, "--only", target, "--cases", cases, "--seed", "5", "--save", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"{target} ") and f" {CASES[target]} cases,   0 findings" in result.stdout


def test_every_target_is_fuzzed_here() -> None:
    command = [sys.executable, str(SCRIPT), "--help"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "{" + ",".join(CASES) + "}" in output.replace("\n", "").replace(" ", "")


def test_what_was_found_once_is_right(fuzz: Fuzz, toy_bundle: Path) -> None:
    cases = [path for target in SAVED.iterdir() for path in target.iterdir()]
    result = fuzz("--toy", toy_bundle, "--replay", SAVED)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": right\n") == len(cases) >= 10
