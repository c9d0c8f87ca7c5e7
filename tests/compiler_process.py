"""Compiles libraries in processes that are forked from one which has imported TVM already, since the import
takes a CPU second.

`python -m tests.compiler_process MODULE DIRECTORY` calls `main` of MODULE, as a build does.
`tests/compiler/test_compiler.py` checks that a forked process and a new Python process write the same bytes.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mlcbuild.compiler import action
from mlcbuild.errors import CompileError
from tests.forkserver import ROOT, ForkServer

PRELOADED = (
    "mlcbuild.compiler.library",
    "mlcbuild.compiler.cpu.child",
    "mlcbuild.compiler.cpu.ops",
    "mlcbuild.compiler.gpu.gpu_child",
    "mlcbuild.compiler.gpu.program_library",
)
SERVER = ForkServer(preloaded=PRELOADED, variables={"PYTHONHASHSEED": "0"})
atexit.register(SERVER.close)


def run_child(directory: Path, seconds: float, module: str) -> None:
    """Compiles a library as the file request.json in `directory` describes it, in a forked process, and
    replaces the function that starts a new Python process. Raises CompileError if the process fails or runs
    longer than `seconds`. module: name of the module with the compiler's entry point."""
    try:
        result = SERVER.run(
            "tests.compiler_process", [module, str(directory)], directory, _environment(), seconds
        )
    except subprocess.TimeoutExpired:
        raise CompileError(f"the compiler did not finish in {seconds:g} s") from None
    sys.stderr.write(result.stderr)
    if result.returncode != 0:
        raise action._failure(directory, result.returncode, result.stderr)


def run_program(module: str, *arguments: str) -> None:
    """Runs `python -m module arguments...`, a program that uses TVM, in a forked process from this checkout's
    root. Asserts that it succeeds."""
    result = SERVER.run(module, arguments, ROOT, _environment())
    assert result.returncode == 0, result.stderr


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TVM_")}
    return environment | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONHASHSEED": "0",
    }


def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes compilations run in forked processes, instead of new Python processes, until the end of a
    test."""
    monkeypatch.setattr(action, "run_child", run_child)


if __name__ == "__main__":
    import_module(sys.argv.pop(1)).main()
