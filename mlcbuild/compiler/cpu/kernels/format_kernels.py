"""Loads the CPU kernels of each stored format, one module in mlcbuild/compiler/cpu/formats/, by the format's
name.

No import statement names such a module. A build step that compiles a library lists the modules of its
quantization scheme in `Step.code`, so that only the cache keys of libraries with these formats depend on
them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from mlcbuild.compiler.cpu import formats
from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.float_product import RowFormat
from mlcbuild.compiler.cpu.kernels.table_rows import TableRow
from mlcbuild.errors import CompileError
from mlcbuild.quant import Storage

SUFFIX = "_kernel"
"""Last part of the name of a module with a format's kernels, after the name of the format."""


@dataclass(frozen=True)
class FormatKernel:
    """The functions by which CPU kernels read matrices of one stored format in one layout."""

    rows: Callable[[ISA, int, int], RowFormat] | None
    """Function of (instruction set, number of rows, number of columns) that returns a RowFormat, which reads
    a matrix of the format row by row for products in float32; None for the layout x16, tiles of 16 rows,
    which int8_product.py reads.
    """
    copy_row: Callable[[TableRow], None] | None = None
    """Function of a TableRow (a token's row of an embedding table in this format, and the output row) that
    emits the copy of the row, converted to float32. None: the row is copied value by value, with the code
    that reads the format for products in float32.
    """


def kernels() -> dict[tuple[str, str], FormatKernel]:
    """Returns (name of a stored format, name of a layout) -> FormatKernel, from every module in
    mlcbuild/compiler/cpu/formats/.
    """
    names = sorted(module.name.removesuffix(SUFFIX) for module in pkgutil.iter_modules(formats.__path__))
    return {
        (name, layout): kernel
        for name in names
        for layout, kernel in import_module(f"{formats.__name__}.{name}{SUFFIX}").KERNELS.items()
    }


def kernel_for(scheme: Storage) -> FormatKernel:
    """Returns the FormatKernel, the functions that read matrices, of the quantization scheme's stored format
    and layout. Raises CompileError if CPUs have none.
    """
    module = f"{formats.__name__}.{scheme.format}{SUFFIX}"
    try:
        kernel: FormatKernel | None = import_module(module).KERNELS.get(scheme.layout)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        kernel = None
    if kernel is None:
        readable = ", ".join(f"{form} ({layout})" for form, layout in kernels())
        raise CompileError(
            f"scheme {scheme.name}: CPUs need a kernel for format '{scheme.format}' in layout"
            f" '{scheme.layout}', and have none; they read {readable}: choose a scheme with one of these"
        )
    return kernel
