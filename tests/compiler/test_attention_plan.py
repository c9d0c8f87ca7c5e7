"""Tests of how attention is divided into tiles."""

from __future__ import annotations

import pytest

from mlcbuild.compiler.cpu.isa import ISAS
from mlcbuild.compiler.cpu.kernels.attention_plan import AttentionKernel
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads

pytestmark = pytest.mark.xdist_group("attention")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""


def test_tiles_waste_little_of_a_group() -> None:
    isa = next(isa for isa in ISAS if isa.name == "avx512vnni")
    groups = {1: 4, 2: 4, 3: 3, 4: 4, 5: 3, 6: 3, 7: 4, 8: 4, 9: 3, 12: 4}
    for group, tile in groups.items():
        spec = AttentionKernel(isa, Heads(1, 2 * group, 2, 64, "float16"), 1.0, None)
        assert (spec.tile, spec.capacity % tile) == (tile, 0)
