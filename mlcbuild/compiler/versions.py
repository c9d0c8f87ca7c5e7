"""The programs whose versions decide what a library's bytes are. Nothing here imports TVM."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from mlcbuild.errors import SetupError

LLVM = "22"
"""Major version of the LLVM inside the wheel of TVM; the compiling process checks it."""


@cache
def _installed() -> str:
    return metadata.version("apache-tvm")


def compiler() -> dict[str, str]:
    """The part that is inside the wheel of TVM. Raises SetupError when it is not installed."""
    try:
        return {"apache-tvm": _installed(), "llvm": LLVM}
    except metadata.PackageNotFoundError:
        message = "the compiler is not installed: `pip install mlcbuild` installs apache-tvm with it"
        raise SetupError(message) from None


def check() -> None:
    """In the compiling process: TVM's LLVM is the one that keys name. Raises SetupError."""
    from tvm.target.codegen import llvm_version_major

    found = str(llvm_version_major())
    if found != LLVM:
        raise SetupError(
            f"this apache-tvm {metadata.version('apache-tvm')} carries LLVM {found}, not LLVM {LLVM}:"
            " install the version of apache-tvm that mlcbuild asks for"
        )
