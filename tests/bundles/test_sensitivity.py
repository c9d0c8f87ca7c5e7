"""Tests of the sensitivity of matrices to quantization: it is compared with a plain computation, and its
bytes must not depend on the number of cores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlcbuild import models, quant
from mlcbuild.bundles import reference
from mlcbuild.bundles.sensitivity import sensitivity
from mlcbuild.bundles.weight_losses import open_trial
from mlcbuild.checkpoints.exact_weights import checkpoint, read_tensor_names
from mlcbuild.quant.floats import Scratch
from tests.budgets import PARAMS, chosen, inputs
from tests.conftest import TINY
from tests.schemes import SCHEMES

__all__ = ["inputs"]

pytestmark = pytest.mark.xdist_group("budget")  # so that one process measures the losses


def plain_loss(inputs: dict[str, Path], name: str, scheme: str) -> float:
    """Returns the mean KL divergence that quantizing one matrix causes, computed by evaluating the whole
    model twice."""
    config = models.from_json(json.loads((inputs["config"] / "config.json").read_bytes()))
    weights = dict(checkpoint(TINY, config, read_tensor_names(inputs["config"])))
    form = SCHEMES[scheme].definition
    changed = form.unpack(form.pack(weights[name], Scratch(), name), weights[name].shape)
    total = count = 0.0
    for tokens in json.loads((inputs["reference"] / "tokens.json").read_bytes()):
        exact = reference.logits(config, weights, tokens, dtype=np.float64)
        actual = reference.logits(config, {**weights, name: changed}, tokens, dtype=np.float64)
        for p, q in zip(exact, actual, strict=True):
            one, other = (np.exp(row) / np.exp(row).sum() for row in (p, q))
            total += float((one * np.log(one / other)).sum())
            count += 1
    return total / count


@pytest.mark.parametrize("name", ["embed.weight", "layers.0.attn.qkv.weight", "layers.4.mlp.down.weight"])
@pytest.mark.parametrize("scheme", ["q4a8_1", "q5a8_1"])
def test_losses_are_those_of_one_quantized_matrix(inputs: dict[str, Path], name: str, scheme: str) -> None:
    rows = json.loads((inputs["sensitivity"] / "sensitivity.json").read_bytes())["matrices"]
    (row,) = (row for row in rows if row["name"] == name)
    assert row["losses"][scheme] == pytest.approx(plain_loss(inputs, name, scheme), rel=0.01)
    param = next(param for param in open_trial(PARAMS, inputs).matrices if param.name == name)
    assert row["bytes"][scheme] == quant.stored_bytes([param], SCHEMES[scheme])
    assert len(rows) == 21


def test_the_bytes_do_not_depend_on_the_number_of_cores(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLCBUILD_CORES", "2")
    (tmp_path / "table").mkdir()
    sensitivity(PARAMS, inputs, tmp_path / "table")
    again = {**inputs, "sensitivity": tmp_path / "table"}
    chosen(again, tmp_path / "two", "target_bits", 5.0)
    monkeypatch.setenv("MLCBUILD_CORES", "1")
    chosen(inputs, tmp_path / "one", "target_bits", 5.0)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
