"""Runs as the child process in which TVM lowers the kernels of a GPU program, so that a crash of TVM fails
one build step only. Request and results are files in the directory named by the process's first argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlcbuild.compiler import child

if TYPE_CHECKING:
    from mlcbuild.compiler.child import Build


def main() -> None:
    child.main(_backend)


def _backend() -> Build:
    from mlcbuild.compiler.gpu import program_library

    return program_library.build
