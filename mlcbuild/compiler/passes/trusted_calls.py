"""The pass that leaves out what a library would check, fetch and release again and again for nothing.

The virtual machine's entry code checks the type and shape of every argument of every function: for a
program of thirty layers that is thousands of checks for each token. Here only the entries that others call
keep them, and only for what differs from call to call: weights are compared with the library's own list
when they are loaded, and a library's functions call each other with what was checked before.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import IRModule, relax
from tvm.relax import Binding, Expr, Function, Var

_CHECKS = {"vm.builtin.check_tensor_info", "vm.builtin.check_shape_info", "vm.builtin.check_tuple_info"}
_MATCH = "vm.builtin.match_shape"
_STORE = 1
"""The code by which `match_shape` keeps a dimension, MatchShapeCode::kStoreToHeap; others only compare."""


def trusted_calls(mod: IRModule) -> IRModule:
    """Drop needless checks, and values that nothing uses then. Runs once shapes are computed, before
    functions are named."""
    for name, function in mod.functions.items():
        if isinstance(function, Function):
            mod.update_func(name, _lean(function))
    return mod


def _lean(function: Function) -> Function:
    public = "global_symbol" in (function.attrs or {})
    checked = {param for param in function.params if public and not isinstance(param.ty, relax.TupleType)}
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    kept = [binding for binding in bindings if not _needless(binding.value, checked)]
    block = relax.BindingBlock(_used(kept, function.body.body))
    body = relax.SeqExpr([block], function.body.body)
    lean = Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    made: Function = relax.BlockBuilder().normalize(lean)
    return made


def _needless(value: Expr, checked: set[Var]) -> bool:
    if not (isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)):
        return False
    name, arguments = str(value.op.global_symbol), value.args
    if name in _CHECKS:
        return arguments[0] not in checked
    if name == _MATCH:
        return arguments[0] not in checked and _STORE not in _codes(arguments)
    return False


def _codes(arguments: Sequence[Expr]) -> list[int]:
    """What `match_shape(value, heap, rank, code, operand, code, operand, ..., message)` does."""
    return [int(code.value) for code in arguments[3:-1:2]]


def _used(bindings: Sequence[Binding], result: Expr) -> list[Binding]:
    """Without tuples and their fields that nothing reads."""
    read = {result}
    kept: list[Binding] = []
    for binding in reversed(bindings):
        if isinstance(binding.value, relax.TupleGetItem | relax.Tuple) and binding.var not in read:
            continue
        kept.append(binding)
        read.update(relax.analysis.free_vars(binding.value))
    return kept[::-1]
