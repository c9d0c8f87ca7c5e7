"""Tests of the table of stored formats that CPU kernels can read."""

from __future__ import annotations

import pytest

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels.format_kernels import kernel_for, kernels
from mlcbuild.compiler.cpu.ops import CpuOps
from mlcbuild.errors import CompileError
from mlcbuild.quant import Storage
from mlcbuild.quant.format import load_format
from mlcbuild.targets import presets
from mlcbuild.targets.backends import CPU_LAYOUTS
from tests.compiler.toy_backend import CONFIG
from tests.schemes import SCHEMES


def test_the_table_of_layouts_is_that_of_the_kernels() -> None:
    assert set(kernels()) == set(CPU_LAYOUTS.items())
    for name, layout in kernels():
        load_format(name, layout)


def test_every_built_in_scheme_has_a_kernel() -> None:
    isa = isa_for(presets.resolve("x86-64-v3"))
    rows = {name: kernel_for(scheme).rows for name, scheme in SCHEMES.items()}
    names = {name: read(isa, 64, 64).name for name, read in rows.items() if read is not None}
    assert names == {
        "q0f32": "f32",
        "q0f16": "f16",
        "q4f32_1": "w4f32",
        "q4f16_1": "w4f16",
        "q8f32_1": "w8f32",
        "q8f16_1": "w8f16",
    }
    tiled = {name for name, scheme in SCHEMES.items() if scheme.layout == "x16"}
    assert set(rows) - set(names) == tiled, "their products take tiles"


@pytest.mark.parametrize(("form", "layout"), [("toy", "row"), ("q4s", "row"), ("q4f16", "x16")])
def test_a_library_for_a_format_without_a_kernel_is_refused(form: str, layout: str) -> None:
    """Checks that compiling fails with an error that names the readable formats if no CPU kernel reads the
    scheme's format in its layout. Both must match, because two formats may use one layout with different
    meanings."""
    ops = CpuOps(CONFIG, Storage("q4m", form, layout), presets.resolve("x86-64-v3"))
    with pytest.raises(
        CompileError,
        match=rf"^scheme q4m: CPUs need a kernel for format '{form}' in layout '{layout}', and have none; "
        r"they read e4m3 \(row\), e5m2 \(row\), f16 \(plain\), .*: choose a scheme with one of these$",
    ):
        ops.linear("lm_head.weight", (16, 32)).name  # noqa: B018
