"""The table of formats that the kernels of CPUs read."""

from __future__ import annotations

import pytest

from mlcbuild.compiler.cpu.kernels.format_kernels import KERNELS, kernel_for
from mlcbuild.compiler.cpu.ops import CpuOps
from mlcbuild.errors import CompileError
from mlcbuild.quant import Storage
from mlcbuild.quant.format import load_format
from mlcbuild.targets import target as targets
from mlcbuild.targets.backends import CPU_LAYOUTS
from tests.compiler.toy_backend import CONFIG
from tests.schemes import SCHEMES


def test_the_table_of_layouts_is_that_of_the_kernels() -> None:
    assert set(KERNELS) == set(CPU_LAYOUTS.items())
    for name, layout in KERNELS:
        load_format(name, layout)


def test_every_built_in_scheme_has_a_kernel() -> None:
    kinds = {name: kernel_for(scheme) for name, scheme in SCHEMES.items()}
    assert set(kinds.values()) == {"dense", "rows", "tiles"}
    assert kinds["q5a8_1"] == "tiles" and kinds["q8f32_1"] == "rows" and kinds["q0f16"] == "dense"


@pytest.mark.parametrize(("form", "layout"), [("toy", "row"), ("q4s", "row"), ("q4f16", "x16")])
def test_a_library_for_a_format_without_a_kernel_is_refused(form: str, layout: str) -> None:
    """A format may have the layout's name and mean other numbers, so both decide."""
    ops = CpuOps(CONFIG, Storage("q4m", form, layout), targets.resolve("x86-64-v3"))
    with pytest.raises(
        CompileError,
        match=rf"^scheme q4m: CPUs need a kernel for format '{form}' in layout '{layout}', and have none; "
        r"they read f32 \(plain\), .*: choose a scheme with one of these$",
    ):
        ops.linear("lm_head.weight", (16, 32)).name  # noqa: B018
