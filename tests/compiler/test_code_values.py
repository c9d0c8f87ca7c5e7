"""Tests of the conversion of 8-bit floats in GPU kernels, compared with the package ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.code_values import float_value
from mlcbuild.compiler.gpu.tensorir import KernelBuilder, bind, kernel, put
from mlcbuild.quant.blocks import E4M3, E5M2, FloatCode
from tests import gpu_kernels

pytestmark = pytest.mark.xdist_group("gpu")


def convert(name: str, kind: FloatCode) -> KernelBuilder:
    with kernel(name) as k:
        values = k.buffer("values", (256,))
        with k.launch(64, 4) as (block, _, thread):
            place = bind(block * 64 + thread)
            put(values, float_value(kind, bind(T.Cast("uint32", place))), place)
    return k


@pytest.mark.parametrize(
    ("kind", "peer"), [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)], ids=["e4m3", "e5m2"]
)
@pytest.mark.parametrize("host", ["adapter", "opencl"])
def test_every_finite_number_is_exact(kind: FloatCode, peer: Any, host: str) -> None:
    """Checks all codes, also of subnormal numbers and of both zeros."""
    buffers = {"values": np.zeros(256, np.float32)}
    actual = np.asarray(gpu_kernels.HOSTS[host](convert, (kind,), {}, buffers)["values"], np.float32)
    expected = np.arange(256, dtype=np.uint8).view(peer).astype(np.float32)
    finite = np.isfinite(expected)
    assert finite.sum() in (254, 248)
    assert (actual.view(np.uint32) == expected.view(np.uint32))[finite].all()
