"""Tests that another package can add a kind of device: one entry in a table, and one implementation of the
interface `Ops`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from mlcbuild_format import abi
from mlcbuild_format.errors import BundleError
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.loading import LOADERS
from mlcbuild_runtime.executor.sampling_params import Sampling
from mlcbuild_runtime.text.tokenizer import Tokenizer

from mlcbuild import pipeline, quant, recipe
from mlcbuild.build.graph import Step
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import InputError, UsageError
from mlcbuild.pipeline import Pipeline
from mlcbuild.targets import presets
from mlcbuild.targets import target as targets
from mlcbuild.targets.backends import BACKENDS, Backend, backend
from tests.conftest import project
from tests.guide import example
from tests.runtime import toy as toy_model
from tests.schemes import SCHEMES

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = {value.name for value in vars(abi).values() if isinstance(value, abi.Function)} - {
    abi.METADATA.name  # made of what the memory planner has computed
}


def test_a_program_is_built_with_ops_of_another_device() -> None:
    command = [sys.executable, "-m", "tests.compiler.toy_backend"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    actual, without_loop = json.loads(result.stdout)
    assert set(actual["functions"]) == FUNCTIONS
    assert actual["loaded"] == []
    assert actual["calls"] == {
        "embed": 3,
        "angles": 2,  # one for each rope
        "copy": 1,
        "attention": 2,  # layers that differ only in their windows share a function
        "feed_forward": 2,
        "last_norm": 1,
        "select_rows": 2,
        "logits": 2,
        "mask": 3,
        "sample": 3,
        "next_inputs": 1,
    }
    loop = {function.name for function in abi.CAPABILITIES["decode_loop"]}
    assert set(without_loop["functions"]) == FUNCTIONS - loop


@pytest.fixture
def toy() -> Iterator[Backend]:
    """Adds the example device that mlcbuild/README.md shows to the tables of devices in this process until
    the test ends, and yields the part of it that compiles (its backend)."""
    exec(example("Extend: a device"))
    yield BACKENDS["toy"]
    del BACKENDS["toy"], LOADERS["toy"]


def test_the_engine_answers_with_a_device_that_is_added_to_the_table(toy: Backend, tmp_path: Path) -> None:
    toy_model.write(tmp_path / "bundle", "toy")
    executor = loading.load(tmp_path / "bundle")
    tokenizer = Tokenizer.load(tmp_path / "bundle", executor.manifest.serving)
    engine, events = Engine(executor, tokenizer).start(), SimpleQueue[Event]()
    try:
        engine.submit(Request((3, 5), 20, Sampling(0.0), ignore_eos=True, logprobs=0), events.put)
        answer = [events.get(timeout=120) for _ in range(20)]
        assert [event.logprob.token for event in answer if event.logprob] == toy_model.expected([3, 5], 20)
    finally:
        assert engine.close()
    with pytest.raises(BundleError, match="is for the device 'tpu', but this runtime has only 'cpu'"):
        toy_model.write(tmp_path / "other", "tpu")
        loading.load(tmp_path / "other")


TEXT = """version: 1
models: {tiny: ./tiny}
quantizations: [q4a8_1]
targets: [x86-64-v3, x86-64-v2]
"""


def steps(path: Path, device: str | None) -> dict[str, Step]:
    """Returns step name -> build step for the recipe at `path`, with the target x86-64-v2 changed to the
    device `device`. None: the recipe is used unchanged."""
    read = recipe.load(path)
    if device is not None:
        other = replace(read.targets["x86-64-v2"], device=device)
        read = replace(read, targets={**read.targets, "x86-64-v2": other})
    created: Pipeline = pipeline.build(read, Lock())
    return {step.name: step for step in created.graph.steps()}


def test_a_backend_in_the_table_decides_the_steps_of_its_targets(toy: Backend, tmp_path: Path) -> None:
    path = project(tmp_path, TEXT)
    plain, actual = steps(path, None), steps(path, "toy")
    scheme = quant.to_json(SCHEMES["q4a8_1"])
    (library,) = (name for name in actual if name.startswith("library/") and name.endswith("/x86-64-v2"))
    assert actual[library].action == toy.action
    assert actual[library].tools == {"toy": "1 for toy"}
    assert actual["weights/tiny/q4a8_1/row"].params["scheme"] == {**scheme, "layout": "row"}
    bundle = actual["bundle/tiny-q4a8_1-x86-64-v2"]
    assert bundle.inputs["weights"].node == "weights/tiny/q4a8_1/row"
    assert "runtime" not in bundle.inputs
    assert actual["verify/tiny-q4a8_1-x86-64-v2"].needs == ("toy",)
    cpu = [name for name in plain if not name.endswith("x86-64-v2")]
    assert cpu and all(actual[name] == plain[name] for name in cpu), "steps for CPUs stay as they are"


def test_a_layout_that_the_format_lacks_is_refused_before_work(toy: Backend, tmp_path: Path) -> None:
    BACKENDS["toy"] = replace(toy, layout=lambda scheme: "toy-4")
    with pytest.raises(
        InputError,
        match=r"recipe.yaml:2:\d+: model 'tiny', quantization 'q4a8_1', target "
        r"'x86-64-v2': format 'q4s' cannot be stored in layout 'toy-4', .* it has: x16, row; choose",
    ):
        steps(project(tmp_path, TEXT), "toy")


def test_a_device_without_a_backend_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"target 'x86-64-v2': no backend compiles for device 'cpux'.*cpu"):
        steps(project(tmp_path, TEXT), "cpux")


def test_recipes_may_name_the_devices_of_the_table() -> None:
    text = (ROOT / "mlcbuild" / "schema" / "target.schema.json").read_text()
    assert list(BACKENDS) == json.loads(text)["properties"]["device"]["enum"]


def test_a_cpu_target_is_written_as_ever() -> None:
    preset = presets.resolve("x86-64-v3")
    assert targets.to_json(preset)["device"] == "cpu"
    assert list(targets.to_json(preset)) == ["triple", "cpu", "features", "device", "output"]
    assert backend(preset) is BACKENDS["cpu"]
