"""Runs compiler passes and code generation, from a program in TVM's IR to object files, and lists in order
the passes that are not specific to kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tvm import IRModule, relax, tirx
from tvm.ir import GlobalVar, transform
from tvm.relax import transform as R
from tvm.target import Target as TvmTarget
from tvm.tirx.compilation_pipeline import (
    finalize_device_passes,
    finalize_host_passes,
    register_tir_pipeline,
)

from mlcbuild import progress
from mlcbuild.compiler.passes.kernels_only import kernels_only
from mlcbuild.compiler.passes.ordered_shapes import ordered_shapes
from mlcbuild.compiler.passes.trusted_calls import trusted_calls
from mlcbuild.errors import CompileError

Mark = Callable[[str], None]
"""A callback that receives the name of each phase of a compilation when the phase starts."""

KERNELS_PER_OBJECT = 6
"""Maximum number of kernels that LLVM compiles in one call, after which progress is reported. A call takes
about 25 ms in addition to the time for its kernels: a library with 24 kernels, of smollm2-135m, took 5.11 CPU
s in groups of 6 and 5.06 in one (EPYC, Zen 5, means of 5 runs)."""

Phases = tuple[tuple[str, Callable[[], Callable[[IRModule], IRModule]]], ...]
"""Compiler passes in order, as pairs (description, function that constructs the pass). A pass is constructed
just before it runs.
"""

PLAN: Phases = (
    ("check that kernels compute everything", lambda: kernels_only),
    ("forget purity", R.RemovePurityChecking),
    ("call kernels with their outputs", R.CallTIRRewrite),
    ("plan memory", R.StaticPlanBlockMemory),
)
"""The compiler passes up to memory planning, which is the last. After them the memory that a library needs is
known."""

LOWER: Phases = (
    ("allocate tensors in storage", R.LowerAllocTensor),
    ("forget second names", R.CanonicalizeBindings),
    ("call the runtime", R.LowerRuntimeBuiltin),
    ("compute numbers", R.ComputePrimValue),
    ("compute shapes", R.VMShapeLower),
    ("order the dimensions of shapes", lambda: ordered_shapes),
    ("trust callers", lambda: trusted_calls),
    ("name functions", R.AttachGlobalSymbol),
)
"""The compiler passes after memory planning, up to the input of the code generator for TVM's virtual machine.
"""


def run(mod: IRModule, phases: Phases, target: TvmTarget, mark: Mark) -> IRModule:
    """Applies compiler passes to a module in order and returns the result. target: the target for which they
    compile; mark: callback that receives the description of each pass before its first run. Raises
    CompileError with the name of the first pass that yields an ill-formed module; an exception that a pass
    raises itself passes unchanged if no pass before it yields one.

    Only the last result is checked: a check after each pass takes a tenth of the time that a small library
    takes. If the result is ill-formed or a pass raises ValueError or RuntimeError, the passes run again with
    all checks, but without calls of `mark`, to find the first one with an ill-formed result.
    """
    with target:
        result = mod
        try:
            for name, make in phases:
                mark(name)
                result = make()(result)
            relax.analysis.well_formed(result)
        except (ValueError, RuntimeError):
            _check_each(mod, phases)
            raise
    return result


def _check_each(mod: IRModule, phases: Phases) -> None:
    """Applies compiler passes to a module, and raises CompileError with the name of the first one that yields
    an ill-formed module; returns nothing if there is none. Exceptions of the passes themselves pass
    unchanged."""
    for name, make in phases:
        mod = make()(mod)
        try:
            relax.analysis.well_formed(mod)
        except ValueError as error:
            raise CompileError(f"the compiler's phase '{name}' broke the program: {error}") from None


def objects(mod: IRModule, target: TvmTarget, directory: Path, mark: Mark, kernels: Phases) -> list[Path]:
    """Compiles a lowered module to object files in `directory`, the kernels' machine code and the program of
    TVM's virtual machine, and returns their paths. The module must have a kernel, and the directory must
    exist. mark: callback that receives "generate machine code"; kernels: the compiler passes for kernels. The
    number of compiled kernels is reported through mlcbuild.progress, with the unit "functions"; TVM's
    exceptions pass unchanged."""
    mark("generate machine code")
    pipeline = kernel_pipeline(kernels)
    first, last = _groups(mod)
    total = len(last) + sum(len(group) for group in first)
    paths: list[Path] = []
    for number, group in enumerate(first):
        progress.report(number * KERNELS_PER_OBJECT, total, "functions")
        paths.append(directory / f"kernels{number}.o")
        tirx.build(_only(mod, group), target, pipeline).write_to_file(str(paths[-1]))
    progress.report(len(first) * KERNELS_PER_OBJECT, total, "functions")
    others = [name for name, function in mod.functions.items() if not isinstance(function, tirx.PrimFunc)]
    executable = relax.build(_only(mod, [*others, *last]), target, relax_pipeline=None, tir_pipeline=pipeline)

    def collect(_: str, files: list[str]) -> None:
        paths.extend(Path(file) for file in files)

    collect.object_format = "o"  # type: ignore[attr-defined]  # how TVM is told
    executable.export_library(str(directory / "library"), fcompile=collect, workspace_dir=str(directory))
    progress.report(total, total, "functions")
    return paths


def _groups(mod: IRModule) -> tuple[list[list[GlobalVar]], list[GlobalVar]]:
    """Returns the GlobalVars of a module's kernels in alphabetical order, as (groups of KERNELS_PER_OBJECT
    kernels each, the remaining 1 to KERNELS_PER_OBJECT kernels, which are compiled together with the program
    of TVM's virtual machine). The module must have a kernel."""
    names = [name for name, function in mod.functions.items() if isinstance(function, tirx.PrimFunc)]
    names.sort(key=lambda name: str(name.name_hint))
    groups = [names[start : start + KERNELS_PER_OBJECT] for start in range(0, len(names), KERNELS_PER_OBJECT)]
    return groups[:-1], groups[-1]


def _only(mod: IRModule, names: Sequence[GlobalVar]) -> IRModule:
    """Returns a TVM module with only those functions of `mod` whose GlobalVars are in `names`, and with the
    attributes of `mod`."""
    return IRModule({name: mod[name] for name in names}, attrs=mod.attrs)


def kernel_pipeline(kernels: Phases) -> str:
    """Registers the passes `kernels`, followed by TVM's final passes, as the pipeline "mlcbuild" of TVM, and
    returns this name for relax.build. A later call replaces the pipeline."""

    def passes() -> tuple[transform.Pass, Callable[[], transform.Pass], Callable[[], transform.Pass]]:
        return (
            transform.Sequential([make() for _, make in kernels]),
            finalize_host_passes,
            finalize_device_passes,
        )

    register_tir_pipeline("mlcbuild", passes)
    return "mlcbuild"
