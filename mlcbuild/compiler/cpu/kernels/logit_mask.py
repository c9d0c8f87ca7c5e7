"""Emits the kernel that sets the logits of disallowed tokens to minus infinity before tokens are sampled."""

from __future__ import annotations

from mlcbuild_format.abi import MASK_BITS, MASK_ROW, MASK_WORD
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, size_var
from mlcbuild.compiler.cpu.kernels.sampling_row import BLOCK, TASK, infinity
from mlcbuild.compiler.cpu.kernels.vectors import i32, span, splat

PART = BLOCK * TASK
"""Number of logits of a row that one parallel task masks. Even a single row is masked by all threads. Each of
them masks the logits that it has computed and will read next, because fetching a row from another core's
caches takes longer than computing it.
"""


def masked(isa: ISA) -> PrimFunc:
    """Returns the kernel (masks int32 [m, 1 + w], logits float32 [q, v] in place) that sets the logits of
    excluded tokens to minus infinity. A mask is the index of a row of logits, followed by w words with at
    least v bits, lowest token in the lowest bit, which are set for allowed tokens. Rows of logits without a
    mask stay unchanged.
    """
    floats, scalar = Floats(isa, isa.lanes), Floats(isa, 1)
    lanes = floats.lanes
    with kernel("masked_logits") as building:
        width = size_var("v")
        masks = building.tensor("masks", (size_var("m"), size_var("w")), "int32", align=4)
        # Rows of logits need not be aligned.
        logits = building.tensor("logits", (size_var("q"), width), align=4)

        def vector(mask: Expr, row: Expr, at: Expr, some: Floats) -> None:
            size = some.lanes
            word = T.bind(masks[mask, MASK_BITS + at // MASK_WORD] >> T.Cast("int32", at % MASK_WORD))
            bits = (splat(word, size) >> span(T.int32(0), size)) & i32(1, size)
            masked_logits = T.Select(bits != i32(0, size), some.load(logits, row, at), infinity(-1, size))
            some.store(logits, masked_logits, row, at)

        with building.body():
            parts = T.bind((width + (PART - 1)) // PART)
            with T.parallel(masks.shape[0] * parts) as index:
                mask, first = T.bind(index // parts), T.bind(index % parts * PART)
                row = T.bind(T.Cast("int64", masks[mask, MASK_ROW]))
                size = T.bind(T.min(T.int64(PART), width - first))
                full_vectors = T.bind(size // lanes)
                with T.serial(full_vectors) as k:
                    vector(mask, row, T.bind(first + k * lanes), floats)
                with T.serial(size - full_vectors * lanes) as rest:
                    vector(mask, row, T.bind(first + full_vectors * lanes + rest), scalar)
    return building.func
