"""Tests that greedy decoding of a whole context, one token at a time, selects the tokens that the reference
finds most likely with the bundle's weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlcbuild import models, quant
from mlcbuild.bundles import reference
from mlcbuild.checkpoints import conversion
from tests.schemes import SCHEMES

DECODE = """
import json
import sys
from pathlib import Path
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.devices.cpu import CpuExecutor
model = CpuExecutor.load(Path(sys.argv[1]), threads=1)
tokens = json.loads(sys.argv[2])
pages = list(range(-(-model.limits.context_window // 16)))
done, new = 0, tokens
while len(tokens) < model.limits.context_window:
    length = done + len(new)
    logits = model.forward(ModelStep.of([(new, length, pages[: -(-length // 16)])]))
    done, new = length, [int(logits[-1].argmax())]
    tokens = tokens + new
print(json.dumps(tokens))
"""
"""Program that decodes a whole context of the most likely tokens. argv: bundle, prompt."""

NEAR = {"q0f32": 1e-4, "q4f16_1": 2e-2, "q4a8_1": 0.5}
"""Scheme -> largest difference of logits between the reference's most likely token and the selected one.
Logits span a range of 3. The difference comes from the order of float32 sums, float16 keys and values, and
8-bit activations."""


@pytest.mark.parametrize("scheme", NEAR)
def test_every_token_is_the_most_likely_one(scheme: str, tiny_bundles: Path) -> None:
    bundle = tiny_bundles / "dist" / f"tiny-{scheme}-host"
    check(bundle, SCHEMES[scheme], [1, 17, 60, 45, 100, 9], NEAR[scheme])


def check(bundle: Path, scheme: quant.Storage, prompt: list[int], near: float) -> float:
    """Decodes greedily to the end of the context. Asserts that each token is nearly the most likely one of
    the reference, and returns the fraction that are exactly the most likely ones. near: allowed distance in
    logits."""
    result = subprocess.run(
        [sys.executable, "-c", DECODE, str(bundle), json.dumps(prompt)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    tokens = json.loads(result.stdout)
    manifest = json.loads((bundle / "bundle.json").read_bytes())
    assert len(tokens) == manifest["limits"]["context_window"]
    config = models.from_json(manifest["model"]["config"])
    held = conversion.unpacked(bundle, config, scheme)
    logits = reference.logits(config, held, tokens[:-1], dtype=np.float64)[len(prompt) - 1 :]
    chosen = np.array(tokens[len(prompt) :])
    behind = logits.max(axis=-1) - logits[np.arange(len(chosen)), chosen]
    assert behind.max() < near, f"token {int(behind.argmax())} of {len(chosen)}"
    return float((behind == 0).mean())
