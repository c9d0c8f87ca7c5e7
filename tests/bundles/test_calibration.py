"""Tests of the calibration step, which measures how much each input column of a matrix matters, and of how
much smaller the error of quantized weights becomes by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlcbuild_runtime.text.tokenizer import Tokenizer
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mlcbuild import progress
from mlcbuild.bundles import calibration
from mlcbuild.bundles.calibration import calibrate
from mlcbuild.checkpoints import conversion
from mlcbuild.errors import UsageError
from mlcbuild.models import action
from mlcbuild.quant import to_json
from mlcbuild.quant.importance import IMPORTANCE, REPORT, importance_of
from tests.checkpoint_files import shorten
from tests.conftest import TINY, checked, mlcbuild, project
from tests.recipes import readme_recipes
from tests.schemes import SCHEMES

pytestmark = pytest.mark.xdist_group("budget")
PROMPTS = ["What is 12 + 30?", "reverse stone", "copy abc"]


def measured(directory: Path, prompts: list[str]) -> Path:
    out = directory / "calibration"
    out.mkdir(parents=True)
    action.normalise({}, {"checkpoint": TINY}, directory / "config")
    inputs = {"config": directory / "config", "checkpoint": TINY, "tokenizer": TINY}
    calibrate({"prompts": list(prompts), "context_window": None}, inputs, out)
    return out


def test_importance_is_the_mean_square_of_activations(tmp_path: Path) -> None:
    """Checks that the measured importance of a matrix column is the mean square of its input activation over
    all tokens. For the first matrix, whose inputs are normalized embeddings, the expected values are computed
    here in float64."""
    importance = importance_of({"calibration": measured(tmp_path, PROMPTS)})
    weights = load_file(TINY / "model.safetensors")
    ids = [token for prompt in PROMPTS for token in Tokenizer.load(TINY).encode(prompt)]
    rows = weights["model.embed_tokens.weight"][ids].astype(np.float64)
    epsilon = json.loads((TINY / "config.json").read_bytes())["rms_norm_eps"]
    normalized = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + epsilon)
    expected = np.square(normalized * weights["model.layers.0.input_layernorm.weight"]).mean(axis=0)
    np.testing.assert_allclose(importance["layers.0.attn.qkv.weight"], expected, rtol=1 / 32)
    matrices = ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")
    names = {f"layers.{i}.{name}.weight" for i in range(5) for name in matrices}
    assert set(importance) == {"embed.weight", *names}


def test_the_bytes_do_not_depend_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PERIOD", 0.0)
    reports: list[tuple[int, int, str]] = []
    progress.listen(lambda *report: reports.append(report))
    try:
        first = measured(tmp_path / "one", PROMPTS)
    finally:
        progress.listen(None)
    monkeypatch.setenv("MLCBUILD_CORES", "3")
    second = measured(tmp_path / "two", PROMPTS)
    assert (first / IMPORTANCE).read_bytes() == (second / IMPORTANCE).read_bytes()
    assert reports and reports[-1][0] == reports[-1][1] and reports[-1][2] == "tokens"


def test_prompts_without_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="calibrate: no prompt has more than one token; give at least one"):
        measured(tmp_path, [""])


def test_only_the_first_tokens_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that calibration reads its prompts up to a limit of tokens only: a text beyond it does not
    change the measured importances, and the report states the number of tokens that were read."""
    monkeypatch.setattr(calibration, "MOST_TOKENS", 20)
    texts = ["What is 12 + 30?", "reverse stone", "copy abc", "sort 3 1 2"]
    first, second = (measured(tmp_path / str(n), texts[:n]) for n in (3, 4))
    assert (first / IMPORTANCE).read_bytes() == (second / IMPORTANCE).read_bytes()
    assert json.loads((second / REPORT).read_bytes())["tokens"] == 20


def test_conversion_reads_the_importance(tmp_path: Path) -> None:
    """Checks that quantizing with measured importances of columns, the output of a calibration step, lowers
    the error weighted by these importances by more than a tenth."""
    scheme = SCHEMES["q3a8_2"]
    directory = measured(tmp_path, PROMPTS)
    inputs = {"config": tmp_path / "config", "checkpoint": TINY}
    conversion.convert({"scheme": to_json(scheme)}, inputs, tmp_path / "plain")
    conversion.convert(
        {"scheme": to_json(scheme)}, {**inputs, "calibration": directory}, tmp_path / "calibrated"
    )
    plain, calibrated = (conversion.read(tmp_path / name) for name in ("plain", "calibrated"))
    name = "layers.0.mlp.down"
    weight = load_file(TINY / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    importance = importance_of({"calibration": directory})[f"{name}.weight"]

    def weighed(tensors: Mapping[str, NDArray[Any]]) -> float:
        parts = [tensors[f"{name}.{part.suffix}"] for part in scheme.definition.tensors]
        values = scheme.definition.unpack(parts, (128, 384))
        return float((np.square(values - weight) * importance).sum())

    assert weighed(calibrated) < 0.9 * weighed(plain)


def test_the_recipe_of_the_guide(tmp_path: Path, common_store: Path) -> None:
    """Builds the guide's recipe with a plain and a calibrated quantization. Checks that both bundles share
    one compiled library and have different weights, and that only the calibrated one contains a report of the
    calibration."""
    (text,) = (block for block in readme_recipes() if "calibrate:" in block)
    recipe = project(tmp_path, text.replace("models/tiny", "./tiny"))
    shorten(tmp_path / "tiny", 1)
    planned = checked(mlcbuild("plan", recipe, store=common_store))
    assert "calibrate/tiny" in planned
    checked(mlcbuild("run", recipe, store=common_store))
    bundles = [tmp_path / "dist" / f"tiny-{name}-host" for name in ("plain", "calibrated")]
    for bundle in bundles:
        manifest = json.loads((bundle / "bundle.json").read_bytes())
        assert manifest["scheme"]["name"] == "q3a8_2"
        assert (REPORT in manifest["files"]) == (bundle == bundles[1])
    report = json.loads((bundles[1] / REPORT).read_bytes())
    assert (report["prompts"], len(report["matrices"])) == (3, 5)
    assert f"with {report['tokens']} tokens, prompts: 3" in checked(
        mlcbuild("inspect", bundles[1], store=common_store)
    )
    weights = {next(bundle.glob("*.safetensors")).read_bytes() for bundle in bundles}
    assert len(weights) == 2
    libraries = {next(bundle.glob("*.so")).read_bytes() for bundle in bundles}
    assert len(libraries) == 1
    again = checked(mlcbuild("run", recipe, store=common_store))
    assert "built" not in again.replace("0 built", "")
