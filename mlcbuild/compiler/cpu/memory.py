"""How much memory a library needs beside weights and cache when it runs, as it was planned and as its kernels
ask for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from mlcbuild_format.limits import Limits
from tvm import IRModule, relax
from tvm.ir import Op
from tvm.sym import Analyzer, ConstIntBound
from tvm.tirx import AllocBuffer, Bind, Buffer, PrimFunc, SeqStmt, Stmt, Var

from mlcbuild.compiler.program.decoder import bounds

BLOCK = 4096
"""The runtime's pool hands out multiples of this and keeps what is returned."""
STACK = 1024
"""Bytes of an array of known size that TVM puts on the stack at most."""


def workspace(limits: Limits, vocab_size: int, mod: IRModule) -> int:
    """Bytes, from a module whose buffers have just been planned for the library's limits."""
    return _workspace(limits, vocab_size, mod) + _kernels(limits, vocab_size, mod)


def _size(shape: Iterable[int], dtype: str) -> int:
    return int(np.prod(list(shape), dtype=np.int64)) * np.dtype(dtype).itemsize


def _workspace(limits: Limits, vocab_size: int, mod: IRModule) -> int:
    """Blocks of the pool, which are told apart by size: of each size as many as are held at one time.

    A step holds the embeddings, then what the trunk and one layer hold, then its own.
    """
    planned = {
        str(name.name_hint): _blocks(function)
        for name, function in mod.functions.items()
        if isinstance(function, relax.Function)
    }
    trunk, embedded = planned["trunk"], planned["embed"]
    moments = [embedded + trunk + found for name, found in planned.items() if name.startswith("layer")]
    # The trunk's result is in one of its blocks.
    moments += [trunk + found for name, found in planned.items() if name.startswith("step")]
    moments += [embedded + trunk + found for name, found in planned.items() if name.endswith("hidden_states")]
    most: Counter[int] = Counter()
    for moment in moments:
        most |= moment
    return sum(size * count for size, count in _touched(limits, vocab_size, most).items())


def _touched(limits: Limits, vocab_size: int, blocks: Counter[int]) -> Counter[int]:
    """Logits are planned for every row of a chunk; those of max_batch rows are ever written when serving."""
    row = vocab_size * 4
    planned, used = (_rounded(count * row) for count in (limits.rows, limits.max_batch))
    found = Counter(blocks)
    if planned != used:
        found[used] = max(found[used], found.pop(planned, 0))
    return found


def _blocks(function: relax.Function) -> Counter[int]:
    found: Counter[int] = Counter()

    def look(node: object) -> None:
        if not isinstance(node, relax.Call) or not isinstance(node.op, Op):
            return
        if str(node.op.name) == "relax.memory.alloc_storage":
            found[_rounded(int(node.args[0].values[0]))] += 1

    relax.analysis.post_order_visit(function, look)
    return found


def _rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _kernels(limits: Limits, vocab_size: int, mod: IRModule) -> int:
    """Returns the most bytes that a kernel allocates from the pool of its thread, which keeps them."""
    largest = {**bounds(limits), "v": vocab_size}
    kernels = (function for function in mod.functions.values() if isinstance(function, PrimFunc))
    return max(taken_by(kernel, largest, limits.rows) for kernel in kernels)


def taken_by(kernel: PrimFunc, bounds: Mapping[str, int], other: int) -> int:
    """Bytes of the arrays that a kernel holds at one time, on one thread, at most. bounds: the largest values
    of dimensions by name; `other` is that of all others."""
    analyzer = Analyzer()
    for param in kernel.params:
        for size in getattr(param.ty, "shape", ()):
            if isinstance(size, Var):
                most = bounds.get(str(size.name), other)
                analyzer.update(size, ConstIntBound(0, most), override=True)
    return _held(kernel.body, analyzer)


def _held(statement: Stmt, analyzer: Analyzer) -> int:
    """Arrays live to the end of their scope: those of a sequence together, and the largest scope inside."""
    own = inner = 0
    for part in statement.seq if isinstance(statement, SeqStmt) else [statement]:
        if isinstance(part, AllocBuffer):
            own += _most(part.buffer, analyzer)
        elif isinstance(part, Bind) and str(part.value.ty) == "int64":
            analyzer.bind(part.var, part.value)
        for scope in ("block", "body", "then_case", "else_case"):
            found = getattr(part, scope, None)
            if found is not None:
                inner = max(inner, _held(found, analyzer))
    return own + inner


def _most(buffer: Buffer, analyzer: Analyzer) -> int:
    """Bytes from the pool, at most. Small arrays of known size lie on the stack."""
    bounds = [analyzer.const_int_bound(size) for size in buffer.shape]
    bytes_ = _size((int(bound.max_value) for bound in bounds), str(buffer.ty.dtype))
    known = all(int(bound.min_value) == int(bound.max_value) for bound in bounds)
    return 0 if known and bytes_ <= STACK else _rounded(bytes_)
