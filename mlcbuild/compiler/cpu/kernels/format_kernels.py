"""The table of CPU kernels that read each stored weight format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mlcbuild.errors import CompileError
from mlcbuild.quant import Storage

Kernel = Literal["dense", "rows", "tiles"]

KERNELS: Mapping[tuple[str, str], Kernel] = {
    ("f32", "plain"): "dense",
    ("f16", "plain"): "dense",
    ("q4f32", "row"): "rows",
    ("q4f16", "row"): "rows",
    ("q8f32", "row"): "rows",
    ("q8f16", "row"): "rows",
    ("q4s", "x16"): "tiles",
    ("q5s", "x16"): "tiles",
    ("q8s", "x16"): "tiles",
}
"""(format, layout) -> the kernel that reads it: dense.py, row_group.py ("rows") or int8_product.py
("tiles")."""


def kernel_for(scheme: Storage) -> Kernel:
    """Returns the kernel that reads matrices under a scheme. Raises CompileError if there is none."""
    kernel = KERNELS.get((scheme.format, scheme.layout))
    if kernel is None:
        readable = ", ".join(f"{form} ({layout})" for form, layout in KERNELS)
        raise CompileError(
            f"scheme {scheme.name}: CPUs need a kernel for format '{scheme.format}' in layout"
            f" '{scheme.layout}', and have none; they read {readable}: choose a scheme with one of these"
        )
    return kernel
