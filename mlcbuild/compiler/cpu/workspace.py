"""Computes the memory that a compiled library needs in addition to weights and KV cache: planned buffers, and
the scratch buffers of kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from mlcbuild_format.limits import Limits
from tvm import IRModule, relax
from tvm.sym import Analyzer, ConstIntBound
from tvm.tirx import AllocBuffer, Bind, Buffer, PrimFunc, SeqStmt, Stmt, Var

from mlcbuild.compiler.passes.operations import operations
from mlcbuild.compiler.program.decoder import bounds

BLOCK = 4096
"""Granularity, in bytes, of the runtime's memory pool, which allocates multiples of this and keeps blocks
that are returned.
"""
STACK = 1024
"""Number of bytes below which TVM puts an array of constant size on the stack: an array of exactly this size
comes from the thread's memory pool. TVM calls it kMaxStackAlloca (tvm/runtime/device_api.h)."""


def workspace(limits: Limits, vocab_size: int, mod: IRModule) -> int:
    """Returns the maximum number of bytes that a call of a library needs in addition to weights and KV cache,
    with the scratch arrays of kernels for one thread. mod: the library's module after memory planning.
    """
    return _workspace(limits, vocab_size, mod) + _kernels(limits, vocab_size, mod)


def _size(shape: Iterable[int], dtype: str) -> int:
    return int(np.prod(list(shape), dtype=np.int64)) * np.dtype(dtype).itemsize


def _workspace(limits: Limits, vocab_size: int, mod: IRModule) -> int:
    """Returns the number of bytes of the intermediate buffers that TVM's memory planner has put into a
    library's functions, as far as serving touches them: logits count for max_batch rows only, although those
    of all rows of a prefill chunk are planned. For each size of a buffer, it counts the largest number of
    them in use at one time.

    The runtime calls a function such as `step`; that calls `embed`, then `trunk`, which calls the layers one
    after the other, and each function has buffers of its own. mod: the library's module after memory
    planning.
    """
    planned = {
        str(name.name_hint): _blocks(function)
        for name, function in mod.functions.items()
        if isinstance(function, relax.Function)
    }
    trunk, embedded = planned["trunk"], planned["embed"]
    moments = [
        embedded + trunk + inner_blocks for name, inner_blocks in planned.items() if name.startswith("layer")
    ]
    # The trunk's result is in one of the trunk's blocks.
    moments += [trunk + inner_blocks for name, inner_blocks in planned.items() if name.startswith("step")]
    moments += [
        embedded + trunk + inner_blocks
        for name, inner_blocks in planned.items()
        if name.endswith("hidden_states")
    ]
    most: Counter[int] = Counter()
    for moment in moments:
        most |= moment
    return sum(size * count for size, count in _touched(limits, vocab_size, most).items())


def _touched(limits: Limits, vocab_size: int, blocks: Counter[int]) -> Counter[int]:
    """Returns block size in bytes -> number of memory blocks of this size that serving touches. Logits count
    for max_batch rows only: TVM plans them for every row of a prefill chunk, but serving never writes more.
    blocks: the planned blocks, as block size -> number.
    """
    row = vocab_size * 4
    planned, used = (_rounded(count * row) for count in (limits.rows, limits.max_batch))
    touched = Counter(blocks)
    if planned != used:
        touched[used] = max(touched[used], touched.pop(planned, 0))
    return touched


def _blocks(function: relax.Function) -> Counter[int]:
    return Counter(
        _rounded(int(call.args[0].values[0]))
        for name, call in operations(function)
        if name == "relax.memory.alloc_storage"
    )


def _rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _kernels(limits: Limits, vocab_size: int, mod: IRModule) -> int:
    """Returns the largest number of bytes of scratch arrays that any kernel of the module allocates on one
    thread; the thread's memory pool keeps them.
    """
    largest = {**bounds(limits), "v": vocab_size}
    kernels = (function for function in mod.functions.values() if isinstance(function, PrimFunc))
    return max(taken_by(kernel, largest, limits.rows) for kernel in kernels)


def taken_by(kernel: PrimFunc, bounds: Mapping[str, int], other: int) -> int:
    """Returns the maximum number of bytes of scratch arrays that a kernel holds at one time, on one thread.
    The size of each is rounded up to a multiple of 4096; arrays of constant size below 1024 bytes lie on the
    stack and count as 0. bounds: name of a symbolic dimension -> its largest value; other: the largest value
    of all other dimensions.
    """
    analyzer = Analyzer()
    for param in kernel.params:
        for size in getattr(param.ty, "shape", ()):
            if isinstance(size, Var):
                most = bounds.get(str(size.name), other)
                analyzer.update(size, ConstIntBound(0, most), override=True)
    return _held(kernel.body, analyzer)


def _held(statement: Stmt, analyzer: Analyzer) -> int:
    """Returns the maximum number of bytes that the arrays allocated inside a statement take at one time: the
    sum of those that it allocates itself, which live to the end of their scope, plus the maximum over the
    scopes inside it."""
    allocated = inner = 0
    for part in statement.seq if isinstance(statement, SeqStmt) else [statement]:
        if isinstance(part, AllocBuffer):
            allocated += _most(part.buffer, analyzer)
        elif isinstance(part, Bind) and str(part.value.ty) == "int64":
            analyzer.bind(part.var, part.value)
        for scope in ("block", "body", "then_case", "else_case"):
            nested = getattr(part, scope, None)
            if nested is not None:
                inner = max(inner, _held(nested, analyzer))
    return allocated + inner


def _most(buffer: Buffer, analyzer: Analyzer) -> int:
    """Returns the maximum number of bytes that an array of a kernel takes from the thread's memory pool,
    rounded up to a multiple of 4096. An array of constant size below 1024 bytes lies on the stack and counts
    as 0. analyzer: holds the largest values of the symbolic dimensions.
    """
    bounds = [analyzer.const_int_bound(size) for size in buffer.shape]
    bytes_ = _size((int(bound.max_value) for bound in bounds), str(buffer.ty.dtype))
    is_constant = all(int(bound.min_value) == int(bound.max_value) for bound in bounds)
    return 0 if is_constant and bytes_ < STACK else _rounded(bytes_)
