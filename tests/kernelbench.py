"""Compiles kernels for tests, one module for each instruction set, and computes the results that they should
have."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from mlcbuild_runtime.devices import machine
from numpy.typing import NDArray

from mlcbuild.compiler.cpu.isa import ISA, isa_for, tvm_target
from mlcbuild.compiler.cpu.lowering import KERNELS
from mlcbuild.compiler.phases import kernel_pipeline
from mlcbuild.quant import Storage
from mlcbuild.targets import presets, requirements
from mlcbuild.targets.target import Target
from tests import emulation
from tests.schemes import pack, unpack

Floats = NDArray[np.float64]
Tensor = NDArray[Any]

TARGETS: Mapping[str, Target] = {
    "avx512amx": presets.resolve("x86-64-v4-amx"),
    "avx512vnni": Target("t", "x86_64-unknown-linux-gnu", "x86-64-v4", ("+avx512vnni",)),
    "avx512": Target("t", "x86_64-unknown-linux-gnu", "x86-64-v4"),
    "avxvnni": Target("t", "x86_64-unknown-linux-gnu", "x86-64-v3", ("+avxvnni",)),
    "avx2": Target("t", "x86_64-unknown-linux-gnu", "x86-64-v3"),
    "i8mm": Target("t", "aarch64-unknown-linux-gnu", "neoverse-n1", ("+i8mm",)),
    "neon": Target("t", "aarch64-unknown-linux-gnu", "neoverse-n1"),
    "portable": Target("t", "x86_64-unknown-linux-gnu", "x86-64-v2"),
}
"""Name of an instruction set -> a build target (system and processor) whose kernels use it."""
SAME_FLOATS = {"avxvnni": "avx2", "avx512vnni": "avx512", "avx512amx": "avx512", "i8mm": "neon"}
"""Name of an instruction set -> another one whose kernels are the same except for those with int8 products.
tests/compiler/test_kernels.py checks that they are equal."""


ASSEMBLER = [program for program in (shutil.which("gcc") or shutil.which("clang"),) if program]
"""Program that assembles and links, as a list; empty if there is none: LLVM then generates the code in
memory."""

MEMORY = {"memcpy", "memset", "memmove", "memset_pattern16"}
"""Names of C functions that LLVM may call in place of loops, because every process has them. The last one
exists on macOS only."""


@dataclass(frozen=True)
class Module:
    isa: ISA
    target: Target
    built: tvm.runtime.Module

    @cached_property
    def asm(self) -> str:
        """Returns the assembly text of all kernels in this module. Generating it costs two fifths of the time
        of compiling them, so it is kept."""
        return str(self.built.inspect_source("asm"))

    @cached_property
    def library(self) -> Any:
        """Returns a module that executes the compiled kernels on this machine, by an emulation with AVX2 if
        it lacks their instructions. None if neither is possible."""
        if runs_here(self.target):
            return assembled(self.asm) if ASSEMBLER else self.built
        return emulation.emulated(str(self.built.inspect_source("ll"))) if emulation.available() else None

    def run(
        self, function: tvm.tirx.PrimFunc, shape: tuple[int, ...], *inputs: Tensor, prompt: bool = False
    ) -> Tensor:
        """Runs a kernel and returns its float32 result, an array of `shape`. Inputs are copied to aligned
        memory, and the result is filled with NaN before."""
        out = tvm.runtime.tensor(np.full(shape, np.nan, np.float32))
        arrays = [tvm.runtime.tensor(array) for array in inputs]
        self.library[symbol(function)](*arrays, *said(function, prompt), out)
        result: Tensor = out.numpy()
        return result

    def code(self, function: tvm.tirx.PrimFunc) -> str:
        """Returns the assembly of one kernel, including its parallel loops, which LLVM compiles as separate
        functions."""
        labels = re.split(r"^([A-Za-z_]\w*):", self.asm, flags=re.MULTILINE)
        parts = zip(labels[1::2], labels[2::2], strict=True)
        return "".join(text for label, text in parts if symbol(function) in label)


def symbol(function: tvm.tirx.PrimFunc) -> str:
    return str(function.attrs["global_symbol"])


def said(function: tvm.tirx.PrimFunc, prompt: bool) -> list[int]:
    """Returns the value of a kernel's argument `prompt`, which selects the variant for rows of prompts, in a
    list that is appended to the call's arguments: [1] or [0]. Returns [] if the kernel has no such
    argument."""
    return [int(prompt)] if any(param.name == "prompt" for param in function.params) else []


def compiled(target: Target, functions: list[tvm.tirx.PrimFunc]) -> Module:
    by_symbol = {symbol(function): function for function in functions}
    assert len(by_symbol) == len({*map(id, functions)}), "two kernels have one name"
    built = tvm.compile(
        tvm.IRModule(by_symbol), target=tvm_target(target), tir_pipeline=kernel_pipeline(KERNELS)
    ).mod
    return Module(isa_for(target), target, built)


def assembled(asm: str) -> Any:
    """Assembles kernels to a shared library, loads it and returns the module, so that LLVM has to generate
    their code only once."""
    text = re.sub(r"^\s*\.(?:file|loc)\b.*\n", "", asm, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "kernels.s"), Path(directory, "kernels.so")
        source.write_text(text)
        subprocess.run([*ASSEMBLER, "-shared", "-nostdlib", str(source), "-o", str(library)], check=True)
        return tvm_ffi.load_module(str(library))


def runs_here(target: Target) -> bool:
    """Returns True if this machine has the target's instructions."""
    if requirements.why_not(target, presets.resolve("host")) is not None:
        return False
    return not isa_for(target).amx or machine.allow_tiles()


def need(target: Target) -> None:
    """Skips the test unless this machine can run the target's code or emulate it."""
    if not runs_here(target) and not emulation.available():
        pytest.skip(f"kernels of {isa_for(target).name} cannot run here, and AVX2 is missing to emulate them")


_MADE: dict[str, Module] = {}


def once(name: str, make: Callable[[], Module]) -> Module:
    """Returns the result of `make`, which is called once per process for each `name`. A cache inside a test
    file would exist twice, because pytest and imports load the file under two names."""
    if name not in _MADE:
        _MADE[name] = make()
    return _MADE[name]


def libraries_called(asm: str) -> set[str]:
    """Returns the names of the external functions that a text of assembly calls. TVM's own functions are
    omitted, and so are memcpy and the like, which every process has."""
    defined = set(re.findall(r"^([A-Za-z_]\w*):", asm, re.MULTILINE))
    names = set(re.findall(r"\b(?:call[ql]?|jmp|bl|tail)\s+([A-Za-z_]\w*)(?:@PLT)?\s*$", asm, re.MULTILINE))
    plain = {name.lstrip("_") for name in names - defined}
    return {name for name in plain if not name.startswith("TVM")} - MEMORY


def weights(rng: np.random.Generator, scheme: Storage, n: int, k: int) -> tuple[tuple[Tensor, ...], Floats]:
    """Returns (stored tensors of a matrix [n, k] of gaussian weights, in their order; the matrix that they
    represent, as the format's `unpack` computes it).
    """
    stored = pack(rng.standard_normal((n, k)).astype(np.float32), scheme)
    return stored, unpack(stored, scheme, (n, k)).astype(np.float64)


def rows(rng: np.random.Generator, m: int, k: int) -> Tensor:
    """Returns normally distributed float32 values [m, k], except values whose 8-bit code would lie half-way
    between two integers: how those round depends on the target."""
    x = rng.standard_normal((m, k)).astype(np.float32)
    ratio = _ratios(x).reshape(m, -1)[:, :k]
    x[np.abs(ratio - np.floor(ratio) - 0.5) < 1e-3] = 0
    return x


def activations(x: Tensor, scheme: Storage) -> Floats:
    """Returns activations, in float64, as the matrix product of a quantization scheme reads them: unchanged,
    or rounded to 8 bits with one step for each group of 32. With 4-bit weights the steps are powers of
    two."""
    if not scheme.activation_bits:
        return x.astype(np.float64)
    largest = np.abs(_groups(x)).max(-1, keepdims=True)
    step = np.where(largest > 0, largest / 127, 1)
    if scheme.bits == 4:
        step = np.exp2(np.ceil(np.log2(step)).clip(-100, 104))
    rounded: Floats = (np.rint(_groups(x) / step) * step).reshape(len(x), -1)[:, : x.shape[1]]
    return rounded


def _groups(x: Tensor) -> Floats:
    """Returns the rows of x divided into groups of 32, [m, groups, 32], the last one padded with zeros."""
    m, k = x.shape
    padded = np.zeros((m, -(-k // 32) * 32))
    padded[:, :k] = x
    return padded.reshape(m, -1, 32)


def _ratios(x: Tensor) -> Floats:
    """Returns each value of x divided by the scale of its group: numbers from -127 to 127."""
    groups = _groups(x)
    largest = np.abs(groups).max(-1, keepdims=True)
    return groups * 127 / np.where(largest > 0, largest, 1)
