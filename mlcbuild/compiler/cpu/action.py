"""Compiles a library for a CPU, as the action of a build step. It imports no code of other devices, so that
edits of that code do not change the cache keys of libraries for CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlcbuild.canon import Json
from mlcbuild.compiler import action, versions
from mlcbuild.compiler.cpu import child, toolchain
from mlcbuild.targets.target import Target

TOOLCHAIN = action.Toolchain(child.__name__, toolchain.linker_identity, toolchain.link)


def compile_library(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Compiles a library for a CPU and writes it and its metadata library.json into the directory `out`,
    which must exist. params: scheme, target, limits and perhaps kv_cache as JSON; inputs["config"]: directory
    with the converted config.json. Raises CompileError if a limit, the target or the compiler prevents it,
    CheckpointError for an invalid config, SetupError if this machine cannot link for the target.
    """
    action.compile_library(params, inputs, out, TOOLCHAIN)


def tools(target: Target) -> dict[str, str]:
    """Returns program name -> version of the compiler and the linker, which determine a library's bytes, for
    its cache key. Raises SetupError if one of them is missing.
    """
    return {**versions.compiler(), "linker": toolchain.linker_identity(target)}
