"""Tests that compare elementary functions of kernels, such as exp, with NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, size_var
from mlcbuild.targets import presets
from tests.compiler.attention_batches import RUNNABLE, Array, compiled, device, share
from tests.libharness import aligned

pytestmark = pytest.mark.xdist_group("attention")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""


@cache
def functions(target: str) -> Callable[[Array], Array]:
    """Returns a function that computes exp, tanh and rounding to float16 of vectors of 256 values with a
    compiled kernel."""
    machine = presets.resolve(target)
    floats = Floats.dividing(isa_for(machine), 256)
    with kernel("functions") as created:
        rows = size_var("n")
        x = created.tensor("x", (rows, 256))
        wide = created.tensor("wide", (rows, 2, 256))
        half = created.tensor("half", (rows, 256), "float16")
        with created.body():
            from tvm.script.ir_builder import tirx as T

            with T.serial(rows) as row, T.serial(256 // floats.lanes) as k:
                value = T.bind(floats.load(x, row, k * floats.lanes))
                floats.store(wide, floats.exp(value), row, 0, k * floats.lanes)
                floats.store(wide, floats.tanh(value), row, 1, k * floats.lanes)
                floats.store(half, value, row, k * floats.lanes)
    run = compiled(created.func, target)

    def call(values: Array) -> Array:
        wide = aligned(np.zeros((len(values), 2, 256), np.float32))
        half = aligned(np.zeros((len(values), 256), np.float16))
        run(device(values), share(wide), share(half))
        return np.concatenate([wide, half[:, None].astype(np.float32)], 1)

    return call


@pytest.mark.parametrize("target", RUNNABLE)
def test_elementary_functions(target: str) -> None:
    rng = np.random.default_rng(3)
    values = np.concatenate(
        [
            rng.uniform(-87, 88, 256),
            rng.uniform(-1, 1, 256),
            rng.standard_normal(256) * 1e-6,
            np.linspace(-9, 9, 256),
        ]
    ).astype(np.float32)
    actual = functions(target)(values.reshape(-1, 256))
    exact = values.astype(np.float64).reshape(-1, 256)
    assert np.abs(actual[:, 0] / np.exp(exact) - 1).max() < 2.5e-7
    assert np.abs(actual[:, 1] - np.tanh(exact)).max() < 2e-7


@pytest.mark.parametrize("target", RUNNABLE)
def test_rounding_to_float16_is_numpys(target: str) -> None:
    rng = np.random.default_rng(4)
    edges = [
        0.0,
        -0.0,
        65504.0,
        65519.0,
        65520.0,
        1e6,
        2**-14,
        2**-24,
        2**-25,
        2**-25 * 1.01,
        1.5 * 2**-24,
        6.1e-5,
    ]
    values = np.concatenate(
        [edges, np.negative(edges), rng.standard_normal(488) * 10.0 ** rng.integers(-9, 6, 488)]
    )
    values = values.astype(np.float32).reshape(-1, 256)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    assert np.array_equal(functions(target)(values)[:, 2], expected)
