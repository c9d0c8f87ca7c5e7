"""Compiles a model's library for any device: checks the request, runs TVM in a child process, and links the
object files.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlcbuild.errors
from mlcbuild import child_progress
from mlcbuild.canon import Json
from mlcbuild.compiler import child
from mlcbuild.compiler.compile_request import read_request
from mlcbuild.errors import CompileError, MlcbuildError
from mlcbuild.targets.target import Target

TIMEOUT = 3600
"""Maximum number of seconds for compiling a library, which usually takes a few seconds; after it the compiler
is killed and the step fails with a CompileError."""


@dataclass(frozen=True)
class Toolchain:
    """The parts of a compilation that depend on the device: the name of the code generator's module, which
    runs in a child process, and two functions, which check for a linker and link object files to a library.
    """

    child: str
    """Dotted name of the module whose function `main` the compiler's child process runs."""
    check: Callable[[Target], object]
    """Function that raises SetupError if this machine has no linker for a target."""
    link: Callable[[Sequence[Path], Path, Target], None]


def compile_library(
    params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path, toolchain: Toolchain
) -> None:
    """Compiles a library and writes it (model.so, model.dylib or model.o) and its metadata library.json into
    the directory `out`, which must exist. Prints to standard error which operations of the model use a slower
    kernel than usual, and why.

    params has scheme, target, limits (a null context_window means the model's maximum) and perhaps kv_cache
    as JSON, and inputs["config"] is the directory with the converted config.json. Raises CompileError if a
    limit, the target or the compiler prevents it, CheckpointError for an invalid config, SetupError if this
    machine cannot link for the target."""
    request = read_request(params, inputs)
    toolchain.check(request.target)  # A missing linker is reported before the part that takes long.
    # The directory is below `out`, which the next run removes if this process is killed.
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=out) as area:
        directory = Path(area)
        (directory / "request.json").write_text(json.dumps(request.to_json()))
        run_child(directory, TIMEOUT, toolchain.child)
        objects = [directory / name for name in json.loads((directory / child.OBJECTS).read_text())]
        toolchain.link(objects, out / library_name(request.target), request.target)
        shutil.copyfile(directory / child.METADATA, out / child.METADATA)
    for use, why in json.loads((out / child.METADATA).read_text())["fallbacks"].items():
        sys.stderr.write(f"slow: {use}: {why}\n")


def library_name(target: Target) -> str:
    """Returns the name of the library file for a target: model.o if the target's `output` is "object" (one
    object file that is no shared library), otherwise model.dylib for macOS and model.so for other systems.
    """
    if target.output == "object":
        return "model.o"
    return "model.dylib" if target.system == "macos" else "model.so"


def run_child(directory: Path, seconds: float, module: str) -> None:
    """Compiles the request in `directory`/request.json in a child process, reports its progress to this
    process's listener, and kills it after `seconds`. Copies its stdout and stderr to stderr once it has ended
    by itself. module: dotted name of the module whose function `main` the child runs.

    Raises the error that the child wrote to error.json, or CompileError if it fails without one or takes too
    long."""
    command = [sys.executable, "-c", f"from {module} import main; main()", str(directory)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TVM_")}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONHASHSEED": "0"}
    errors = directory / "stderr"
    with errors.open("wb") as log:
        try:
            process = subprocess.Popen(
                command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            code = child_progress.wait(process, directory / child.PROGRESS, seconds)
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"the compiler did not finish in {seconds:g} s; it was at '{_phase(directory)}'"
            ) from None
    text = errors.read_text(errors="replace")
    sys.stderr.write(text)  # copied into the step's log
    if code != 0:
        raise _failure(directory, code, text)


def _failure(directory: Path, code: int, text: str) -> MlcbuildError:
    reported = directory / child.ERROR
    if reported.is_file():
        name, message = json.loads(reported.read_text())
        kind = getattr(mlcbuild.errors, name)
        error: MlcbuildError = kind(message)
        return error
    tail = "\n".join(text.strip().splitlines()[-12:])
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"stopped with exit code {code}"
    return CompileError(f"the compiler {how} at '{_phase(directory)}':\n{tail}".rstrip(":\n"))


def _phase(directory: Path) -> str:
    try:
        return (directory / child.PHASE).read_text()
    except OSError:
        return "start"
