"""A compiler pass that removes redundant argument checks from a library's functions.

TVM's virtual machine checks type and shape of every argument at the start of every function: for a model of
thirty layers that is thousands of checks per token. This pass keeps them only in exported functions, and
there not for arguments that are tuples: the weights, which are checked once, when they are loaded. A
library's functions call each other with arguments that were checked before.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import IRModule, relax
from tvm.ir import Op
from tvm.relax import Binding, Expr, Function, Var

_CHECKS = {f"vm.builtin.check_{kind}_info" for kind in ("tensor", "shape", "tuple", "prim_value")}
_MATCH, _HEAP = "vm.builtin.match_shape", "vm.builtin.alloc_shape_heap"
_READERS = {"vm.builtin.make_shape", "vm.builtin.make_prim_value"}
_WITH_CONTEXT = Op.get("relax.call_builtin_with_ctx")
_STORE = 1
"""The code (MatchShapeCode::kStoreToHeap) by which TVM's `match_shape` stores a dimension in the shape heap;
other codes compare dimensions.
"""


def trusted_calls(mod: IRModule) -> IRModule:
    """Removes redundant checks of arguments from all Relax functions of a module, then the shape heap (the
    array in which TVM stores dimensions) where nothing needs it, and tuples and their fields that nothing
    uses; returns `mod`, changed in place. A check that also stores a dimension stays where the heap is
    needed. It runs after VMShapeLower and before AttachGlobalSymbol."""
    for name, function in mod.functions.items():
        if isinstance(function, Function):
            mod.update_func(name, _lean(function))
    return mod


def _lean(function: Function) -> Function:
    public = "global_symbol" in (function.attrs or {})
    checked = {param for param in function.params if public and not isinstance(param.ty, relax.TupleType)}
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    remaining = [binding for binding in bindings if not _needless(binding.value, checked)]
    if not any(_reads_heap(binding.value, checked) for binding in remaining):
        remaining = _without_heap(remaining)
    block = relax.BindingBlock(_used(remaining, function.body.body))
    body = relax.SeqExpr([block], function.body.body)
    lean = Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    normalized: Function = relax.BlockBuilder().normalize(lean)
    return normalized


def _name(value: Expr) -> str | None:
    """Returns the name of the external function that a Relax expression calls, directly or with the virtual
    machine's context; None for other expressions.
    """
    if not isinstance(value, relax.Call):
        return None
    called = value.args[0] if value.op == _WITH_CONTEXT else value.op
    return str(called.global_symbol) if isinstance(called, relax.ExternFunc) else None


def _needless(value: Expr, checked: set[Var]) -> bool:
    name = _name(value)
    if name in _CHECKS:
        return value.args[0] not in checked
    if name == _MATCH:
        return value.args[0] not in checked and _STORE not in _codes(value.args)
    return False


def _reads_heap(value: Expr, checked: set[Var]) -> bool:
    """Returns True if a Relax expression needs the shape heap, the array in which TVM's virtual machine
    stores dimensions: the expression reads a dimension from it, or matches the shape of a variable in
    `checked`. checked: the arguments of the function whose type and shape checks are kept."""
    name = _name(value)
    return name in _READERS or (name == _MATCH and value.args[0] in checked)


def _without_heap(bindings: Sequence[Binding]) -> list[Binding]:
    """Returns a list of a Relax function's `bindings`, in order, without the one that creates the shape heap,
    the array in which TVM stores dimensions, and without those that refer to it. The caller ensures that no
    binding reads a dimension from the heap."""
    heaps = {binding.var for binding in bindings if _name(binding.value) == _HEAP}
    return [b for b in bindings if b.var not in heaps and not heaps & set(relax.analysis.free_vars(b.value))]


def _codes(arguments: Sequence[Expr]) -> list[int]:
    """Returns the codes, one for each dimension, among the arguments of TVM's `match_shape(value, heap, rank,
    code, operand, code, operand, ..., message)`.
    """
    return [int(code.value) for code in arguments[3:-1:2]]


def _used(bindings: Sequence[Binding], result: Expr) -> list[Binding]:
    """Returns a Relax function's bindings in their order, except those of tuples and reads of tuple fields
    whose value no remaining binding uses. result: the function's result, which counts as a use."""
    read = {result}
    remaining: list[Binding] = []
    for binding in reversed(bindings):
        if isinstance(binding.value, relax.TupleGetItem | relax.Tuple) and binding.var not in read:
            continue
        remaining.append(binding)
        read.update(relax.analysis.free_vars(binding.value))
    return remaining[::-1]
