"""A compiler pass that orders the computation of tensor dimensions, so that each build has the same bytes.

TVM collects the dimensions that one function computes in a set ordered by memory addresses, so their order
differs from process to process, and with it the library's bytes, once a function computes two of them.
"""

from __future__ import annotations

from tvm import IRModule
from tvm.tirx import BufferStore, PrimFunc, SeqStmt


def ordered_shapes(mod: IRModule) -> IRModule:
    """Brings the statements in TVM's generated shape functions into a fixed order, and returns `mod`, changed
    in place. Such a function computes tensor dimensions and stores them in the shape heap, an array of the
    virtual machine; its stores are sorted by the index in this array. It runs after TVM's pass VMShapeLower,
    which generates the functions.

    The order of stores does not change results: a shape function reads only dimensions that were stored
    before its call.
    """
    for name, function in mod.functions.items():
        if isinstance(function, PrimFunc) and _computes_shapes(function):
            stores = sorted(function.body.seq, key=lambda store: int(store.indices[0]))
            mod.update_func(name, function.with_body(SeqStmt(stores)))
    return mod


def _computes_shapes(function: PrimFunc) -> bool:
    """Returns True if TVM generated a function to compute tensor dimensions, and it stores more than one in
    the shape heap, its only parameter.
    """
    is_host = bool((function.attrs or {}).get("tirx.is_host_func", False))
    body = function.body
    stores = isinstance(body, SeqStmt) and all(isinstance(part, BufferStore) for part in body.seq)
    return is_host and stores and len(function.params) == 1
