"""Tests of the instructions in compiled kernels: the expected ones, none that the target lacks, and no calls
of a C library."""

from __future__ import annotations

import re

import pytest

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels import embedding
from mlcbuild.compiler.cpu.kernels.attention import attention
from mlcbuild.compiler.cpu.kernels.attention_plan import AttentionKernel
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.linear import kernel, linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion
from mlcbuild.targets.target import Target
from tests import kernelbench
from tests.compiler.test_kernels import MODEL, module, product_kernel, scheme_kernels, widest
from tests.kernelbench import TARGETS
from tests.libharness import EVERY
from tests.schemes import SCHEMES

pytestmark = pytest.mark.xdist_group("kernels")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""

LINUX, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


@pytest.mark.parametrize(
    ("triple", "cpu", "features", "name"),
    [
        (LINUX, "sapphirerapids", (), "avx512amx"),
        (LINUX, "sapphirerapids", ("-amx-bf16",), "avx512vnni"),
        (LINUX, "cascadelake", (), "avx512vnni"),
        (LINUX, "znver4", (), "avx512vnni"),
        (LINUX, "x86-64-v4", ("+avx512vnni",), "avx512vnni"),
        (LINUX, "x86-64-v4", (), "avx512"),
        (LINUX, "skylake-avx512", (), "avx512"),
        (LINUX, "haswell", (), "avx2"),
        (LINUX, "x86-64-v3", (), "avx2"),
        (LINUX, "x86-64-v3", ("+avxvnni",), "avxvnni"),
        (LINUX, "alderlake", (), "avxvnni"),
        (LINUX, "haswell", ("-avx2",), "portable"),
        (LINUX, "x86-64-v2", (), "portable"),
        (LINUX, "x86-64", (), "portable"),
        (ARM, "neoverse-n1", (), "neon"),
        (ARM, "neoverse-v1", (), "i8mm"),
        (ARM, "neoverse-n2", (), "i8mm"),
        (ARM, "generic", ("+dotprod", "+i8mm"), "i8mm"),
        (ARM, "generic", ("+dotprod",), "neon"),
        (ARM, "cortex-a72", (), "portable"),
        ("arm64-apple-macosx14.0.0", "apple-m1", (), "neon"),
        ("arm64-apple-macosx14.0.0", "apple-m2", (), "i8mm"),
        ("riscv64-unknown-linux-gnu", "generic-rv64", ("+d",), "portable"),
    ],
)
def test_instruction_set_of_a_target(triple: str, cpu: str, features: tuple[str, ...], name: str) -> None:
    assert isa_for(Target("t", triple, cpu, features)).name == name


@pytest.mark.parametrize("isa", list(TARGETS))
def test_no_library_is_called(isa: str) -> None:
    assert kernelbench.libraries_called(module(isa).asm) == set()


def test_kernels_do_not_check_their_arguments() -> None:
    """Checks that kernels hold no messages about wrong arguments: the checks took 17 % of compiling them. The
    exported functions that call them refuse wrong tensors, see test_trusted_calls.py."""
    assert not re.search(r"TypeError|Mismatched|SetRaised", module("avx2").asm)


def test_vectors_are_not_longer_than_the_target_has() -> None:
    assert not re.search(r"%[yz]mm|\bv[a-z]+\s.*%xmm", module("portable").asm)
    assert not re.search(r"%zmm|%[xy]mm(?:1[6-9]|2\d|3[01])\b|%k[0-7]\b", module("avx2").asm)
    assert not re.search(r"%zmm|%[xy]mm(?:1[6-9]|2\d|3[01])\b|%k[0-7]\b", module("avxvnni").asm)
    assert "vpdpbusd" not in module("avx512").asm + module("avx2").asm
    assert "tile" not in module("avx512vnni").asm


@pytest.mark.parametrize(
    ("isa", "scheme", "instruction"),
    [
        ("avx512amx", "q4a8_1", r"tdpbf16ps\s.*%tmm"),
        ("avx512amx", "q4a8_1", r"tileloaddt1\s.*%tmm"),
        ("avx512amx", "q4a8_1", r"vpdpbusd\s.*%zmm"),
        ("avx512vnni", "q4a8_1", r"vpdpbusd\s.*%zmm"),
        ("avx512", "q4a8_1", r"vpmaddubsw\s.*%zmm"),
        ("avx2", "q4a8_1", r"vpmaddubsw\s.*%ymm"),
        ("portable", "q4a8_1", r"pmullw\s.*%xmm"),
        ("neon", "q4a8_1", r"sdot\s+v\d+\.4s"),
        ("neon", "q8a8_1", r"sdot\s+v\d+\.4s"),
        ("i8mm", "q4a8_1", r"smmla\s+v\d+\.4s"),
        ("i8mm", "q5a8_1", r"smmla\s+v\d+\.4s"),
        ("i8mm", "q8a8_1", r"smmla\s+v\d+\.4s"),
        ("i8mm", "q8a8_1", r"sdot\s+v\d+\.4s"),  # one row of x has no second one
        ("avxvnni", "q4a8_1", r"\{vex\}\s+vpdpbusd\s.*%ymm"),
        ("avxvnni", "q8a8_1", r"\{vex\}\s+vpdpbusd\s.*%ymm"),
        ("avx512vnni", "q8a8_1", r"vpdpbusd\s.*%zmm"),
        ("avx512", "q8a8_1", r"vpmaddwd\s.*%zmm"),
        ("avx2", "q5a8_1", r"vpmaddubsw\s.*%ymm"),
        ("avx2", "q8a8_1", r"vpmaddwd\s.*%ymm"),
        ("portable", "q8a8_1", r"pm(?:ullw|addwd)\s.*%xmm"),
        ("avx512", "q4f16_1", r"vfmadd\d+ps\s.*%zmm"),
        ("avx2", "q8f16_1", r"vfmadd\d+ps\s.*%ymm"),
        ("avx2", "q0f16", r"vcvtph2ps\s"),
        ("avx2", "q4f16_1", r"prefetcht0\s"),
    ],
)
def test_instructions_of_a_product(isa: str, scheme: str, instruction: str) -> None:
    assert re.search(instruction, scheme_kernels(isa, SCHEMES[scheme]))


@pytest.mark.parametrize("isa", list(TARGETS))
def test_rows_are_ready_before_they_are_multiplied(isa: str) -> None:
    """Checks that a product contains a barrier, at which the cores wait for each other. Without it most runs
    would be right by chance."""
    product = product_kernel(isa, "q4a8_1", MODEL)
    assert "TVMBackendParallelBarrier" in module(isa).code(product)
    # Cores share the last iterations by an atomic counter: see tests/compiler/test_cores.py.
    added = r"\b(?:ldadd|ldxr|__aarch64_ldadd)" if isa in ("i8mm", "neon") else r"\block\s+xadd"
    assert re.search(added, module(isa).code(product))


def test_parts_are_there_before_they_are_joined() -> None:
    # The instruction set with a way of its own for prompts, and that with the shortest vectors.
    for name in ("avx512amx", "portable"):
        target = TARGETS[name]
        spec = AttentionKernel(isa_for(target), Heads(1, 4, 2, 16, "float16"), 0.25, None)
        asm = kernelbench.compiled(target, [attention(spec).with_attr("global_symbol", "seen")]).asm
        assert "TVMBackendParallelBarrier" in asm, name
        assert re.search(r"\block\s+xadd", asm), name


TWO = ("q0f16", "q4a8_1")
MORE = (*TWO, "q4f16_1", "q8a8_1") if EVERY else TWO
"""Quantization schemes whose kernels are cross-compiled for a processor that this machine does not have."""


@pytest.mark.parametrize(
    ("target", "instruction", "names"),
    [
        (Target("t", "arm64-apple-macosx14.0.0", "apple-m1"), r"\bsdot\.4s|\bsdot\s+v\d+\.4s", TWO),
        (Target("t", ARM, "cortex-a72"), r"\bmla(?:\.8h|\s+v\d+\.8h)", MORE),
        (
            Target("t", "riscv64-unknown-linux-gnu", "generic-rv64", ("+a", "+d", "+m")),
            r"\bfmul\.s|\bfmadd\.s",
            TWO,
        ),
    ],
    ids=["apple-m1", "cortex-a72", "riscv64"],
)
def test_other_architectures(target: Target, instruction: str, names: tuple[str, ...]) -> None:
    """Checks kernels for other architectures: they compile, with the expected instructions and without calls
    of libraries. They are not executed."""
    isa = isa_for(target)
    schemes = [SCHEMES[name] for name in names]
    functions = [kernel(linear(isa, scheme, 20, 72), Fusion(bias=True)) for scheme in schemes]
    functions += [embedding.kernel(embedding.embedding(isa, scheme, 20, 72)) for scheme in schemes]
    asm = kernelbench.compiled(target, functions).asm
    assert re.search(instruction, asm)
    assert kernelbench.libraries_called(asm) == set()


@pytest.mark.parametrize(
    ("scheme", "instruction", "count"), [("q4a8_1", "vpmaddubsw", 64), ("q8a8_1", "vpmaddwd", 128)]
)
def test_prompts_are_multiplied_in_registers(scheme: str, instruction: str, count: int) -> None:
    """Checks that LLVM keeps the order of a register tile's products with AVX2: each of its 8 vectors of
    float32 sums is stored once in a group. In another order, dozens of vectors would be stored and loaded."""
    code = module("avx2").code(product_kernel("avx2", scheme, widest("avx2", scheme)))
    lines = [line for line in code.splitlines() if re.match(r"\s+[a-z]|\.LBB", line)]
    last = max(i for i, line in enumerate(lines) if instruction in line)
    start = max(i for i, line in enumerate(lines[:last]) if line.startswith("."))
    loop = lines[start : last + 1]
    assert sum(instruction in line for line in loop) == count
    assert sum(bool(re.search(r"vmov\w+\s+%ymm\d+, .*%rsp", line)) for line in loop) <= 9
