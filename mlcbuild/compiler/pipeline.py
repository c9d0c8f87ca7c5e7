"""From a module of kernels to objects: every step, in order, in one list."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tvm import IRModule, relax
from tvm.ir import transform
from tvm.relax import transform as R
from tvm.s_tir import transform as S
from tvm.target import Target as TvmTarget
from tvm.tirx import transform as X
from tvm.tirx.compilation_pipeline import (
    finalize_device_passes,
    finalize_host_passes,
    register_tir_pipeline,
)

from mlcbuild.compiler.passes.kernels_only import kernels_only
from mlcbuild.compiler.passes.trusted_calls import trusted_calls
from mlcbuild.errors import CompileError

Mark = Callable[[str], None]
"""Called with the name of what starts now."""

Phases = tuple[tuple[str, Callable[[], Callable[[IRModule], IRModule]]], ...]
"""(what it does, what makes the pass) in order. Passes are made where they run."""

PLAN: Phases = (
    ("check that kernels compute everything", lambda: kernels_only),
    ("forget purity", R.RemovePurityChecking),
    ("call kernels with their outputs", R.CallTIRRewrite),
    ("plan memory", R.StaticPlanBlockMemory),
)
"""Up to the point at which memory is known."""

LOWER: Phases = (
    ("allocate tensors in storage", R.LowerAllocTensor),
    ("forget second names", R.CanonicalizeBindings),
    ("call the runtime", R.LowerRuntimeBuiltin),
    ("compute numbers", R.ComputePrimValue),
    ("compute shapes", R.VMShapeLower),
    ("trust callers", lambda: trusted_calls),
    ("name functions", R.AttachGlobalSymbol),
)
"""From there to what the virtual machine runs."""

KERNELS: Phases = (
    ("drop blocks", S.ConvertBlocksToOpaque),
    ("drop block bodies", S.LowerOpaqueBlock),
    ("address buffers", X.FlattenBuffer),
    ("use 32-bit indexes where they do", partial(X.NarrowDataType, 32)),
    ("share stack arrays", X.StorageRewrite),
    ("unroll", X.UnrollLoop),
    ("simplify", X.StmtSimplify),
    ("keep selects safe", S.RewriteUnsafeSelect),
    ("check memory", X.VerifyMemory),
    ("mark entries", X.AnnotateEntryFunc),
    ("split host and device", X.SplitHostDevice),
    ("make the calling convention", X.MakePackedAPI),
)
"""The path of a kernel, after the program's and before LLVM. Kernels come scheduled, and LLVM removes common
subexpressions and dead code itself, so this is a third of TVM's own list and takes a quarter of its time."""

PHASES = (*PLAN, *LOWER, *KERNELS)
"""Everything that happens to a library, top to bottom."""


def run(mod: IRModule, phases: Phases, target: TvmTarget, mark: Mark) -> IRModule:
    """Apply phases one after the other. Raises CompileError when what one returns is not well formed."""
    with target:
        for name, make in phases:
            mark(name)
            mod = make()(mod)
            try:
                relax.analysis.well_formed(mod)
            except ValueError as error:
                raise CompileError(f"the compiler's phase '{name}' broke the program: {error}") from None
    return mod


def objects(mod: IRModule, target: TvmTarget, directory: Path, mark: Mark) -> list[Path]:
    """Machine code of the kernels and the program of the virtual machine, as two object files."""
    mark("generate machine code")
    executable = relax.build(mod, target, relax_pipeline=None, tir_pipeline=kernel_pipeline())
    found: list[Path] = []

    def collect(_: str, files: list[str]) -> None:
        found.extend(Path(file) for file in files)

    collect.object_format = "o"  # type: ignore[attr-defined]  # how TVM is told
    executable.export_library(str(directory / "library"), fcompile=collect, workspace_dir=str(directory))
    return found


def kernel_pipeline() -> str:
    """The name under which TVM then knows KERNELS, with its own last passes after them."""

    def passes() -> tuple[transform.Pass, Callable[[], transform.Pass], Callable[[], transform.Pass]]:
        return (
            transform.Sequential([make() for _, make in KERNELS]),
            finalize_host_passes,
            finalize_device_passes,
        )

    register_tir_pipeline("mlcbuild", passes)
    return "mlcbuild"
