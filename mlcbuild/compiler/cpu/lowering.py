"""Lists TVM's passes that lower a kernel for CPUs, from a scheduled loop nest to code for LLVM."""

from __future__ import annotations

from functools import partial

from tvm import IRModule
from tvm.ir import transform
from tvm.s_tir import transform as S
from tvm.tirx import transform as X

from mlcbuild.compiler.cpu.kernels.vectors import UNSIMPLIFIED
from mlcbuild.compiler.phases import Phases


def _simplify() -> transform.Pass:
    """Returns the pass that simplifies the statements of kernels, except those with UNSIMPLIFIED set.

    TVM's pass replaces integer variables by their values. Where these depend on each other, as in attention,
    the program grows exponentially: from 85 to 1270 kB of text with AMX, and LLVM takes twice as long. Dense
    matrix products, whose indexes are constants, need the pass: without it LLVM takes a fifth longer.
    """

    def simplify(mod: IRModule, _: transform.PassContext) -> IRModule:
        functions = {name: f for name, f in mod.functions.items() if not f.attrs.get(UNSIMPLIFIED, 0)}
        mod.update(X.StmtSimplify()(IRModule(functions, attrs=mod.attrs)))
        return mod

    created: transform.Pass = transform.module_pass(simplify, opt_level=0, name="mlcbuild.Simplify")
    return created


KERNELS: Phases = (
    ("drop blocks", S.ConvertBlocksToOpaque),
    ("drop block bodies", S.LowerOpaqueBlock),
    ("address buffers", X.FlattenBuffer),
    ("use 32-bit indexes where they do", partial(X.NarrowDataType, 32)),
    ("share stack arrays", X.StorageRewrite),
    ("unroll", X.UnrollLoop),
    ("simplify", _simplify),
    ("keep selects safe", S.RewriteUnsafeSelect),
    ("check memory", X.VerifyMemory),
    ("mark entries", X.AnnotateEntryFunc),
    ("split host and device", X.SplitHostDevice),
    ("make the calling convention", X.MakePackedAPI),
    ("trust callers", X.SkipAssert),
)
"""Pairs (description, function that returns a pass) that lower a kernel, in order. Kernels arrive scheduled,
and LLVM removes common subexpressions and dead code itself, so this is a third of TVM's own list and takes a
quarter of its time.

Kernels do not check the types and shapes of their arguments. TVM's virtual machine calls them, the exported
functions check what callers pass, and Relax checks shapes and types of each call when the library is
compiled. The checks took 17 % of the time for all kernels of OLMoE, and about half of the bytes of most.
"""
