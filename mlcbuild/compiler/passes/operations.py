"""Lists the operations of Relax functions, for passes that look at every one of them."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import relax
from tvm.ir import Op


def operations(function: relax.Function) -> Iterator[tuple[str, relax.Call]]:
    """Yields (name, such as "relax.reshape"; call) of each Relax operation that a function calls, those in
    branches and inner functions included. Direct calls of kernels, of other functions and of the runtime's
    functions are not operations; "relax.call_tir", which calls a kernel, is one.

    The function must be in A-normal form, as Relax's block builder makes it: each call is the value of a
    binding. A visit of every node of the syntax tree takes a hundred times as long, a tenth of the
    compilation of a small library.
    """
    yield from _of(function.body)


def _of(value: relax.Expr) -> Iterator[tuple[str, relax.Call]]:
    if isinstance(value, relax.SeqExpr):
        for block in value.blocks:
            for binding in block.bindings:
                yield from _of(binding.value)
    elif isinstance(value, relax.If):
        yield from _of(value.true_branch)
        yield from _of(value.false_branch)
    elif isinstance(value, relax.Function):
        yield from _of(value.body)
    elif isinstance(value, relax.Call) and isinstance(value.op, Op):
        yield str(value.op.name), value
