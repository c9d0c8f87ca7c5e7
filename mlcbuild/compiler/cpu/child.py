"""Runs as the child process in which TVM compiles a library for a CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mlcbuild.compiler import child

if TYPE_CHECKING:
    from mlcbuild.compiler.child import Build


def main() -> None:
    child.main(_backend)


def _backend() -> Build:
    from mlcbuild.compiler import library
    from mlcbuild.compiler.cpu.ops import CpuOps

    return partial(library.build, make_ops=CpuOps)
