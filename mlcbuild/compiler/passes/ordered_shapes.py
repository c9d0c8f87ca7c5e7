"""A pass that makes the functions that compute shapes the same in every process.

TVM collects the dimensions that one function computes in a set of addresses, so their order differs from
process to process, and with it the library's bytes, once a function computes two of them.
"""

from __future__ import annotations

from tvm import IRModule
from tvm.tirx import BufferStore, PrimFunc, SeqStmt


def ordered_shapes(mod: IRModule) -> IRModule:
    """Sorts the stores of each function that computes shapes by their places in the heap of shapes. It runs
    after shapes are computed.

    Such a function reads dimensions that were stored before it is called, and none that it stores.
    """
    for name, function in mod.functions.items():
        if isinstance(function, PrimFunc) and _computes_shapes(function):
            stores = sorted(function.body.seq, key=lambda store: int(store.indices[0]))
            mod.update_func(name, function.with_body(SeqStmt(stores)))
    return mod


def _computes_shapes(function: PrimFunc) -> bool:
    """Returns True if a function of TVM's virtual machine stores several dimensions in the heap of shapes,
    its only parameter.
    """
    is_host = bool((function.attrs or {}).get("tirx.is_host_func", False))
    body = function.body
    stores = isinstance(body, SeqStmt) and all(isinstance(part, BufferStore) for part in body.seq)
    return is_host and stores and len(function.params) == 1
