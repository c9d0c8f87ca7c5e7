"""The process in which TVM compiles a library for a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlcbuild.compiler import child

if TYPE_CHECKING:
    from mlcbuild.compiler.library import MakeOps


def main() -> None:
    child.main(_backend)


def _backend() -> MakeOps:
    from mlcbuild.compiler.cpu.ops import CpuOps

    return CpuOps
