"""From a module of kernels to objects: every step of the program, in order, in one list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tvm import IRModule, relax
from tvm.ir import transform
from tvm.relax import transform as R
from tvm.target import Target as TvmTarget
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


def objects(mod: IRModule, target: TvmTarget, directory: Path, mark: Mark, kernels: Phases) -> list[Path]:
    """Machine code of the kernels and the program of the virtual machine, as two object files."""
    mark("generate machine code")
    executable = relax.build(mod, target, relax_pipeline=None, tir_pipeline=kernel_pipeline(kernels))
    found: list[Path] = []

    def collect(_: str, files: list[str]) -> None:
        found.extend(Path(file) for file in files)

    collect.object_format = "o"  # type: ignore[attr-defined]  # how TVM is told
    executable.export_library(str(directory / "library"), fcompile=collect, workspace_dir=str(directory))
    return found


def kernel_pipeline(kernels: Phases) -> str:
    """The name under which TVM then knows these phases, with its own last passes after them."""

    def passes() -> tuple[transform.Pass, Callable[[], transform.Pass], Callable[[], transform.Pass]]:
        return (
            transform.Sequential([make() for _, make in kernels]),
            finalize_host_passes,
            finalize_device_passes,
        )

    register_tir_pipeline("mlcbuild", passes)
    return "mlcbuild"
