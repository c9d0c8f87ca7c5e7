"""Compiles a GPU program, as the action of a build step. It imports no other backend, neither directly nor
indirectly, because the source files of its imports are part of the step's cache key.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlcbuild_format.program import PROGRAM

from mlcbuild.canon import Json
from mlcbuild.compiler import action, versions
from mlcbuild.compiler.gpu import gpu_child
from mlcbuild.targets.target import Target


def compile_library(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Compiles a GPU program and writes program.json, kernels/*.wgsl and library.json into the directory
    `out`. params: scheme, target and limits as JSON; inputs["config"]: directory with the converted
    config.json. Raises CompileError if a limit, the target or the compiler prevents it, CheckpointError for
    an invalid config, SetupError if the installed TVM contains another version of LLVM than expected."""
    action.compile_library(params, inputs, out, action.Toolchain(gpu_child.__name__, _needs_nothing, _place))


def tools(target: Target) -> dict[str, str]:
    """Returns the versions that determine a GPU program, for its cache key: "apache-tvm" -> version of TVM,
    "llvm" -> the major version that its LLVM is expected to have. Raises SetupError if TVM is not installed.
    """
    return versions.compiler()


def _needs_nothing(target: Target) -> None:
    """Does nothing, in place of the check for a linker: a GPU program is not linked."""


def _place(files: Sequence[Path], library: Path, target: Target) -> None:
    """Copies program.json and the kernels' source files into the output directory of a build step, each under
    its path relative to program.json. files: paths of the files to copy; library: a path in the output
    directory, of which only the directory is used; target: unused."""
    base = next(path.parent for path in files if path.name == PROGRAM)
    for path in files:
        destination = library.parent / path.relative_to(base)
        destination.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, destination)
