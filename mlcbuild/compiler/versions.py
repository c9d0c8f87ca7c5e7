"""Returns the versions of TVM and LLVM, which determine a library's bytes, and compares the installed LLVM
with the expected version. Importing this module does not import TVM.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

from mlcbuild.errors import SetupError

LLVM = "22"
"""Major version of the LLVM inside TVM's wheel, as text; `check` raises SetupError if the installed wheel has
another one."""


@cache
def _installed() -> str:
    return metadata.version("apache-tvm")


def compiler() -> dict[str, str]:
    """Returns name -> version of the compiler's programs: "apache-tvm", the installed package, and "llvm",
    the major version that the LLVM inside it is expected to have. Raises SetupError if TVM is not installed.
    """
    try:
        return {"apache-tvm": _installed(), "llvm": LLVM}
    except metadata.PackageNotFoundError:
        message = "the compiler is not installed: `pip install mlcbuild` installs apache-tvm with it"
        raise SetupError(message) from None


def check() -> None:
    """Raises SetupError if the LLVM inside the installed TVM has another major version than cache keys
    assume. It imports TVM, which must be installed, so only the compiler's child process calls it."""
    from tvm.target.codegen import llvm_version_major

    carried = str(llvm_version_major())
    if carried != LLVM:
        raise SetupError(
            f"this apache-tvm {metadata.version('apache-tvm')} carries LLVM {carried}, not LLVM {LLVM}:"
            " install the version of apache-tvm that mlcbuild asks for"
        )
