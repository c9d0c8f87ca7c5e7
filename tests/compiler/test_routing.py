"""Tests of the kernels that choose experts, on CPUs and GPUs, compared with the NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest

from mlcbuild.bundles.reference_experts import route
from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels import routing
from mlcbuild.compiler.gpu.kernels import expert_choice
from mlcbuild.models import Experts, Router
from mlcbuild.targets import presets
from tests import gpu_kernels, kernelbench

SPARSEMIXER = Experts(5, 2, 16, "gelu_tanh", Router("sparsemixer", normalized=False, jitter=0.01))
LOGITS = np.concatenate(
    [
        np.random.default_rng(4).standard_normal((12, 5)),
        [[0, 0, 0, 0, 0], [-3, 0, -1, 0, -2], [0, 0, 0, 2, 0], [-4, -4.01, -4.02, -9, -4], [5, 5, 5, 5, 5]],
    ]
).astype(np.float32)
"""Router logits, random rows and rows in which the largest logits are 0, equal, or negative."""


def by_expert(chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the weight of each expert for each row, [rows, experts], 0 for those not chosen. chosen:
    numbers of the chosen experts, [rows, chosen]; weights: theirs, in the same order."""
    table = np.zeros((len(chosen), SPARSEMIXER.count))
    np.put_along_axis(table, chosen.astype(np.intp), weights.astype(np.float64), axis=1)
    return table


def expected() -> np.ndarray:
    with np.errstate(all="raise"):
        return by_expert(*route(SPARSEMIXER.router, 2, LOGITS.astype(np.float64), None))


def test_sparsemixer_on_cpus() -> None:
    target = presets.resolve("host")
    function = routing.route(isa_for(target), SPARSEMIXER).with_attr("global_symbol", "route")
    choices = kernelbench.compiled(target, [function]).run(function, (len(LOGITS), 4), LOGITS)
    np.testing.assert_allclose(by_expert(choices[:, :2], choices[:, 2:]), expected(), rtol=1e-5)


@pytest.mark.xdist_group("gpu")
def test_sparsemixer_on_gpus() -> None:
    arrays = {"logits": LOGITS, "routes": np.zeros((len(LOGITS), 2, 2), np.int32)}
    results = gpu_kernels.on_adapter(expert_choice.route, (SPARSEMIXER,), {"n": len(LOGITS)}, arrays)
    routes = results["routes"].reshape(-1, 2, 2)
    weights = np.ascontiguousarray(routes[..., 1]).view(np.float32)
    np.testing.assert_allclose(by_expert(routes[..., 0], weights), expected(), rtol=1e-5)
