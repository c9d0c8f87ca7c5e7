"""The compiler: the only place that imports TVM, and only in processes of its own.

`compile_library` is the entry point; `tools` and `linker_identity` tell what enters a library's key.
"""

from mlcbuild.compiler.action import compile_library
from mlcbuild.compiler.toolchain import linker_identity
from mlcbuild.compiler.versions import tools

__all__ = ["compile_library", "linker_identity", "tools"]
