"""A compiler pass that rejects modules in which anything but scheduled kernels computes.

TVM would otherwise lower a remaining operation to unscheduled loops: correct, and a hundred times too slow.
"""

from __future__ import annotations

from tvm import IRModule, relax
from tvm.tirx import PrimFunc

from mlcbuild.compiler.passes.operations import operations
from mlcbuild.errors import CompileError

ALLOWED = frozenset(
    {
        "relax.call_tir",
        "relax.call_tir_inplace",
        "relax.reshape",
        "relax.memory.view",
        "relax.builtin.alloc_tensor",
    }
)
"""Names of the Relax operations that a module may contain: they call a kernel, allocate memory, or view it in
another shape.
"""


def kernels_only(mod: IRModule) -> IRModule:
    """Returns `mod` unchanged. Raises a CompileError that lists all Relax operations without a kernel and all
    kernels without a schedule, if there are any.
    """
    faults: set[str] = set()
    for name, function in sorted(mod.functions.items(), key=lambda item: str(item[0].name_hint)):
        if isinstance(function, PrimFunc) and not function.attrs.get("tirx.is_scheduled", False):
            faults.add(f"kernel '{name.name_hint}' has no schedule")
        if isinstance(function, relax.Function):
            for operation, _ in operations(function):
                if operation not in ALLOWED:
                    faults.add(f"function '{name.name_hint}' uses {operation}, for which there is no kernel")
    if faults:
        raise CompileError("the compiler made a library that would be slow: " + "; ".join(sorted(faults)))
    return mod
