"""Tests that compare constants of the activation kernels with functions of Python's standard library."""

from __future__ import annotations

import math

import numpy as np

from mlcbuild.compiler.cpu.kernels.activation import ERFC_TAIL


def test_the_polynomial_of_gelu_gives_erfc() -> None:
    z = np.linspace(0, 9, 2001)
    t = 1 / (1 + z / 2)
    values = t * np.exp(np.polynomial.polynomial.polyval(t, ERFC_TAIL) - z * z)
    expected = np.array([math.erfc(each) for each in z])
    assert float(np.abs(values / expected - 1).max()) < 1e-7
