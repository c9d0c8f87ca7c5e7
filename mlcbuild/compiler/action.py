"""Compiles a library for any device: checks the request, runs TVM in a child process, and links."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from mlcbuild_format.limits import Limits

import mlcbuild.errors
from mlcbuild import models, quant
from mlcbuild.canon import Json
from mlcbuild.compiler import child
from mlcbuild.errors import CompileError, MlcbuildError
from mlcbuild.models import ModelConfig
from mlcbuild.targets import target as targets
from mlcbuild.targets.target import Target

TIMEOUT = 3600
"""Maximum number of seconds for compiling a library, which usually takes a few seconds."""


@dataclass(frozen=True)
class Toolchain:
    """The programs and checks of one device that building a library needs. The code generator itself runs in
    the child process.
    """

    child: str
    """Name of the module whose `main` runs in the child process."""
    check: Callable[[Target], object]
    """Function that raises SetupError if this machine cannot link for a target."""
    link: Callable[[Sequence[Path], Path, Target], None]


def compile_library(
    params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path, toolchain: Toolchain
) -> None:
    """Writes model.so, model.dylib or model.o, and library.json, into `out`.

    params has scheme, target and limits as JSON (a null context_window means the model's maximum), and
    inputs["config"] is the directory with the converted config.json. Raises CompileError if a limit, the
    target or the compiler prevents it, CheckpointError for an invalid config, SetupError if this machine
    cannot link for the target.
    """
    config = json.loads((inputs["config"] / "config.json").read_text())
    target = targets.from_json(cast("Mapping[str, Json]", params["target"]))
    model = models.from_json(config)
    limits = _limits(model, cast("Mapping[str, int | None]", params["limits"]))
    params = {**params, "limits": asdict(limits)}
    _check(model, limits, params, target)
    toolchain.check(target)  # A missing linker is reported before the part that takes long.
    # The directory is below `out`, which the next run removes if this process is killed.
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=out) as area:
        directory = Path(area)
        (directory / "request.json").write_text(json.dumps({**params, "config": config}))
        run_child(directory, TIMEOUT, toolchain.child)
        objects = [directory / name for name in json.loads((directory / child.OBJECTS).read_text())]
        toolchain.link(objects, out / library_name(target), target)
        shutil.copyfile(directory / child.METADATA, out / child.METADATA)
    for use, why in json.loads((out / child.METADATA).read_text())["fallbacks"].items():
        sys.stderr.write(f"slow: {use}: {why}\n")


def library_name(target: Target) -> str:
    """Returns the file name of a library for this target."""
    if target.output == "object":
        return "model.o"
    return "model.dylib" if target.system == "macos" else "model.so"


def _limits(config: ModelConfig, requested: Mapping[str, int | None]) -> Limits:
    """Returns the limits of a library. A null context window becomes the model's maximum."""
    window = models.context_window(config, requested["context_window"])
    chunk, max_batch = requested["prefill_chunk"] or 0, requested["max_batch"] or 0
    return Limits(window, min(chunk, window), max_batch)


def _check(config: ModelConfig, limits: Limits, params: Mapping[str, Json], target: Target) -> None:
    """Raises CompileError with all problems of a request to compile a library, before compiling."""
    faults = [
        f"compile.{name} must be at least 1, found {value}"
        for name in ("context_window", "prefill_chunk", "max_batch")
        if (value := getattr(limits, name)) < 1
    ]
    if limits.context_window > config.max_position:
        faults.append(
            f"compile.context_window is {limits.context_window}, but the model was made for"
            f" {config.max_position} positions: use at most that"
        )
    if target.output == "shared" and target.system not in ("linux", "macos"):
        faults.append(f"a shared library for {target.triple} cannot be made: use `output: object`")
    scheme = quant.from_json(cast("dict[str, Json]", params["scheme"]))
    faults += quant.check_overrides(scheme, models.parameters(config))
    if faults:
        raise CompileError("\n".join(faults))


def run_child(directory: Path, seconds: float, module: str) -> None:
    """Compiles the request in `directory` in a child process, for at most `seconds`. module: the child's
    module. Raises CompileError, or the error that the child reported.
    """
    command = [sys.executable, "-c", f"from {module} import main; main()", str(directory)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TVM_")}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONHASHSEED": "0"}
    errors = directory / "stderr"
    with errors.open("wb") as log:
        try:
            done = subprocess.run(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"the compiler did not finish in {seconds:g} s; it was at '{_phase(directory)}'"
            ) from None
    text = errors.read_text(errors="replace")
    sys.stderr.write(text)  # copied into the step's log
    if done.returncode != 0:
        raise _failure(directory, done.returncode, text)


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
