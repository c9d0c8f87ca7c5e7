"""Tests that the loops which measure a machine's limits contain the instructions whose rate they report, and
keep their operands in registers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.targets.target import Target
from tests import kernelbench
from tests.conftest import ROOT

X86 = "x86_64-unknown-linux-gnu"
TARGETS = {
    "avx2": Target("avx2", X86, "x86-64-v3"),
    "avx512": Target("avx512", X86, "x86-64-v4"),
    "avx512vnni": Target("avx512vnni", X86, "cascadelake"),
    "avxvnni": Target("avxvnni", X86, "alderlake"),
    "i8mm": Target("i8mm", "aarch64-unknown-linux-gnu", "neoverse-n2"),
    "neon": Target("neon", "aarch64-unknown-linux-gnu", "neoverse-n1"),
    "portable": Target("portable", X86, "x86-64-v2"),
}
PRODUCT = {
    "avx2": r"vpmaddubsw\s+%ymm",
    "avx512": r"vpmaddubsw\s+%zmm",
    "avx512vnni": r"vpdpbusd\s+%zmm",
    "avxvnni": r"vpdpbusd\s+.*%ymm",
    "i8mm": r"smmla\s+v\d+\.4s",
    "neon": r"sdot\s+v\d+\.4s",
    "portable": r"pmullw\s+",
}
"""Name of an instruction set -> regular expression that matches, in assembly, the int8 dot-product
instruction whose rate a benchmark measures."""
FUSED = {
    "avx2": r"vfmadd\w+ps\s.*%ymm",
    "avx512": r"vfmadd\w+ps\s.*%zmm",
    "avx512vnni": r"vfmadd\w+ps\s.*%zmm",
    "avxvnni": r"vfmadd\w+ps\s.*%ymm",
    "i8mm": r"fmla\s+v\d+\.4s",
    "neon": r"fmla\s+v\d+\.4s",
    "portable": r"mulps\s+",
}
"""Name of an instruction set -> regular expression that matches, in assembly, the float32 multiply
instruction whose rate a benchmark measures."""

JUMP = r"\s+(j\w+|b\.?\w*|cbn?z)\s"
"""Matches a branch instruction of x86 or Arm."""


@pytest.fixture(scope="module")
def limits() -> ModuleType:
    spec = spec_from_file_location("bench_limits", ROOT / "ci" / "bench" / "cpu_parts" / "limits.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def loops(assembly: str) -> Iterator[str]:
    """Yields the assembly of each innermost loop: the lines from a label to a jump back to it, without
    another label between them."""
    lines = assembly.splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if re.match(r"\.LBB\w+:", line):
            start = number
        elif start is not None and re.match(
            rf"\s+(j\w+|b\.?\w*|cbn?z)\s.*{re.escape(lines[start][:-1])}$", line
        ):
            yield "\n".join(lines[start:number])


def counted(assembly: str, instruction: str) -> int:
    """Returns how often the instruction occurs in one iteration of the loop that contains it. instruction:
    regular expression. Asserts that exactly one loop contains it."""
    numbers = [count for loop in loops(assembly) if (count := len(re.findall(instruction, loop)))]
    assert len(numbers) == 1, (instruction, numbers)
    return numbers[0]


@pytest.mark.parametrize("name", list(TARGETS))
def test_every_counted_product_is_in_the_timed_loop(limits: ModuleType, name: str) -> None:
    """Checks that every counted multiplication is in the loop whose time is measured: the compiler would move
    a product of operands that never change out of the loop."""
    target = TARGETS[name]
    isa = isa_for(target)
    assert isa.name == name
    dots, products = limits.dots(isa, 1), limits.products(isa, 1)
    module = kernelbench.compiled(target, [dots, products])
    tile = limits.dot_tile(isa).products
    for function, instruction, number in (
        (dots, PRODUCT[name], tile),
        (products, FUSED[name], limits.CHAINS),
    ):
        per_iteration = counted(module.code(function), instruction)
        assert per_iteration and per_iteration % number == 0, (name, per_iteration)


@pytest.mark.parametrize("name", list(TARGETS))
def test_sums_and_operands_stay_in_registers(limits: ModuleType, name: str) -> None:
    target = TARGETS[name]
    dots = limits.dots(isa_for(target), 1)
    code = kernelbench.compiled(target, [dots]).code(dots)
    loop = next(loop for loop in loops(code) if re.search(PRODUCT[name], loop))
    assert not re.findall(r"\(%rsp\)|\[sp", loop)
