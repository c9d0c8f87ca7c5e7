"""Tests that another package can add a stored format, here one with three tensors, with the file that
mlcbuild/README.md shows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from mlcbuild_format.signature import signature
from mlcbuild_format.weights import read_header
from mlcbuild_runtime.executor.loading import LOADERS
from numpy.typing import NDArray

from mlcbuild import models, pipeline, quant, recipe
from mlcbuild.bundles import reference
from mlcbuild.checkpoints import conversion, exact_weights
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import CheckpointError, InputError
from mlcbuild.models import ModelConfig, action
from mlcbuild.quant import Scheme, Storage, format, formats
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.targets.backends import BACKENDS, CPU_LAYOUTS
from tests import schemes
from tests.conftest import TINY, project
from tests.guide import example
from tests.outside import copy_package, printed, prospect
from tests.test_extension import extend

FILE = "mlcbuild/quant/formats/toy.py"
KERNEL = "mlcbuild/compiler/cpu/formats/toy_kernel.py"
STORAGE = Storage("q4m", "toy", "row", overrides=(("embed", schemes.SCHEMES["q8f16_1"]),))
TOKENS = [1, 17, 60, 45, 100, 9]
Floats = NDArray[np.float64]

RECIPE = """\
version: 1
models: {tiny: ./tiny}
quantizations: [q4f16_1, q4a8_1]
targets: [x86-64-v3]
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adds the weight format that mlcbuild/README.md shows as an example, and a quantization scheme that uses
    it, to the tables of this process until the test ends."""
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "toy.py").write_text(example("Extend: a format"))
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path / "added")])
    monkeypatch.setitem(SCHEMES, "q4m", Scheme("q4m", "toy"))
    format.format_names.cache_clear()
    yield
    sys.modules.pop("mlcbuild.quant.formats.toy", None)
    format.format_names.cache_clear()
    format.layouts.cache_clear()


def independent(weight: NDArray[np.float32]) -> tuple[Floats, Floats]:
    """Returns (the values that the documentation's example of a weight format stores for `weight`; the scale
    of each value's group), computed in float64 by the definition of the format. Minimum and scale are rounded
    to float16, and codes are integers from 0 to 15."""
    rows, columns = weight.shape
    wide = np.pad(weight.astype(np.float64), ((0, 0), (0, -columns % 32))).reshape(rows, -1, 32)
    minimum = wide.min(axis=2, keepdims=True).astype(np.float16).astype(np.float64)
    scale = ((wide.max(axis=2, keepdims=True) - minimum) / 15).astype(np.float16).astype(np.float64)
    levels = np.arange(16) * scale[..., None] + minimum[..., None]
    nearest = np.abs(levels - wide[..., None]).argmin(axis=-1)
    values = nearest * scale + minimum
    return values.reshape(rows, -1)[:, :columns], np.broadcast_to(scale, wide.shape).reshape(rows, -1)[
        :, :columns
    ]


def converted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ModelConfig, Mapping[str, NDArray[np.float32]]]:
    """Converts the embedded model's weights to the example format, a few rows at a time, to the directory
    `weights` of `root`. Returns (the model's config; parameter name -> original float32 values)."""
    (root / "config").mkdir()
    action.normalise({}, {"checkpoint": TINY}, root / "config")
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setenv("MLCBUILD_CORES", "2")
    inputs = {"config": root / "config", "checkpoint": TINY}
    conversion.convert({"scheme": quant.to_json(STORAGE)}, inputs, root / "weights")
    config = models.from_json(json.loads((root / "config" / "config.json").read_bytes()))
    return config, exact_weights.checkpoint(TINY, config, exact_weights.read_tensor_names(root / "config"))


def test_three_tensors_are_converted_and_read_back(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, original = converted(tmp_path, monkeypatch)
    stored = conversion.read(tmp_path / "weights")
    down = {name: array for name, array in stored.items() if name.startswith("layers.0.mlp.down.")}
    rows, columns = original["layers.0.mlp.down.weight"].shape
    groups = -(-columns // 32)
    assert {name.rpartition(".")[2]: (array.shape, str(array.dtype)) for name, array in down.items()} == {
        "codes": ((rows, groups, 16), "uint8"),
        "scale": ((rows, groups), "float16"),
        "minimum": ((rows, groups), "float16"),
    }
    assert "embed.q_weight" in stored, "an override keeps its own format"
    back = conversion.unpacked(tmp_path / "weights", config, STORAGE)
    for name, weight in original.items():
        if weight.ndim != 2 or name == "embed.weight":
            continue
        expected, step = independent(weight)
        away = np.abs(back[name] - expected) > 1e-6
        # Half-way between two codes, float32 may round to the other one.
        assert away.mean() < 1e-4 and (np.abs(back[name] - expected) <= step + 1e-6).all()
        assert (np.abs(back[name] - weight) <= 0.51 * step + 1e-3 * np.abs(weight)).all()


def test_the_header_holds_the_signature_of_all_tensors(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = converted(tmp_path, monkeypatch)
    (path,) = (tmp_path / "weights").iterdir()
    header, expected = read_header(path), quant.stored_parameters(models.parameters(config), STORAGE)
    assert header.scheme == "q4m"
    assert header.signature == signature(
        (item.name, item.shape, item.dtype, item.layout) for item in expected
    )
    assert {(item.name, item.shape, item.dtype) for item in header.tensors} == {
        (item.name, item.shape, item.dtype) for item in expected
    }


def test_weights_that_are_not_finite_are_refused(toy: None) -> None:
    matrix = schemes.normal(4, 64)
    matrix[2, 3] = np.nan
    with pytest.raises(CheckpointError, match="m: it holds infinite or NaN weights"):
        schemes.pack(matrix, STORAGE, "m")


def test_the_reference_computes_with_the_format(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, original = converted(tmp_path, monkeypatch)
    back = conversion.unpacked(tmp_path / "weights", config, STORAGE)
    exact = {
        name: independent(weight)[0]
        if weight.ndim == 2 and name != "embed.weight"
        else back[name].astype(np.float64)
        for name, weight in original.items()
    }
    logits_read = reference.logits(config, back, TOKENS)
    expected = reference.logits(config, exact, TOKENS, dtype=np.float64)
    assert np.abs(logits_read - expected).max() < 1e-3 * np.abs(expected).max()
    untouched = reference.logits(config, original, TOKENS, dtype=np.float64)
    assert 1e-3 < np.abs(expected - untouched).max() < 0.5 * np.abs(untouched).max()


def test_the_cpu_refuses_a_format_without_kernels_before_work(toy: None, tmp_path: Path) -> None:
    path = project(tmp_path, RECIPE.replace("[q4f16_1, q4a8_1]", "[q4m]"))
    with pytest.raises(
        InputError,
        match=r"recipe.yaml:2:\d+: model 'tiny', quantization 'q4m', target 'x86-64-v3': scheme q4m: CPUs "
        r"have no kernels for format 'toy'; they have some for f32, .*: choose a scheme with one of these",
    ):
        pipeline.build(recipe.load(path), Lock())


def test_a_kernel_for_cpus_does_not_promise_one_for_gpus(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast("dict[str, str]", CPU_LAYOUTS), "toy", "row")
    text = RECIPE.replace("[q4f16_1, q4a8_1]", "[q4m]").replace("x86-64-v3", "webgpu")
    with pytest.raises(
        InputError, match=r"scheme q4m: GPUs have no kernels for format 'toy'; they have some"
    ):
        pipeline.build(recipe.load(project(tmp_path, text)), Lock())


def test_a_backend_that_reads_the_format_builds_with_it(toy: None, tmp_path: Path) -> None:
    exec(example("Extend: a device"))
    try:
        read = recipe.load(project(tmp_path, RECIPE.replace("[q4f16_1, q4a8_1]", "[q4m]")))
        target = replace(read.targets["x86-64-v3"], device="toy")
        created = pipeline.build(replace(read, targets={"x86-64-v3": target}), Lock())
        steps = {step.name: step for step in created.graph.steps()}
    finally:
        del BACKENDS["toy"], LOADERS["toy"]
    assert steps["weights/tiny/q4m/row"].params == {"scheme": quant.to_json(Storage("q4m", "toy", "row"))}
    assert steps["weights/tiny/q4m/row"].code == ("mlcbuild.quant.formats.toy",)
    described = steps["bundle/tiny-q4m-x86-64-v3"].params["scheme"]
    assert isinstance(described, dict) and (described["bits"], described["dtype"]) == (4, "float16")


def test_a_new_format_moves_no_key(tmp_path: Path) -> None:
    """Checks that adding a format, its kernel and their table entries to a copy of the package changes no
    existing cache key."""
    root = copy_package(tmp_path)
    (tmp_path / "work").mkdir()
    path = project(tmp_path / "work", RECIPE)
    before = printed(prospect(root, path))
    extend(root)
    after = printed(prospect(root, path))
    assert "weights/tiny/q4a8_1/x16" in after["keys"] and after == before
    path.write_text(RECIPE.replace("q4a8_1", "q4m"))
    keys = printed(prospect(root, path))["keys"]
    holders = {
        name.split("/")[0] + "/" + name.split("/")[2] for name, parts in keys.items() if FILE in parts["code"]
    }
    assert holders == {"weights/q4m", "library/q4m"}
    assert {name.split("/")[0] for name, parts in keys.items() if KERNEL in parts["code"]} == {"library"}


def test_the_guide_loads_no_device(tmp_path: Path) -> None:
    """Checks that the weight format which mlcbuild/README.md shows as an example imports neither TVM nor
    torch: a format needs only NumPy."""
    (tmp_path / "toy.py").write_text(example("Extend: a format"))
    code = "import sys, toy; sys.exit(any(name in sys.modules for name in ('tvm', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
