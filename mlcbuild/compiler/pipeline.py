"""From a module of kernels to objects: every step, in order, in one list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tvm import IRModule, relax
from tvm.relax import transform as R
from tvm.target import Target as TvmTarget

from mlcbuild.compiler.passes.kernels_only import kernels_only
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
    ("free after the last use", R.KillAfterLastUse),
    ("call the runtime", R.LowerRuntimeBuiltin),
    ("compute numbers", R.ComputePrimValue),
    ("compute shapes", R.VMShapeLower),
    ("name functions", R.AttachGlobalSymbol),
)
"""From there to what the virtual machine runs."""

PHASES = (*PLAN, *LOWER)
"""All of them: the whole path of a library's program. Kernels take no part in it: they come scheduled."""


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
    executable = relax.build(mod, target, relax_pipeline=None)
    found: list[Path] = []

    def collect(_: str, files: list[str]) -> None:
        found.extend(Path(file) for file in files)

    collect.object_format = "o"  # type: ignore[attr-defined]  # how TVM is told
    executable.export_library(str(directory / "library"), fcompile=collect, workspace_dir=str(directory))
    return found
