"""Tests of the engine and the server with a GPU bundle of the embedded model, as with a CPU bundle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
from mlcbuild_format import bundle
from mlcbuild_format.errors import BundleError, EngineError, SetupError
from mlcbuild_runtime.devices import gpu
from mlcbuild_runtime.executor.batch import ModelStep

from . import shared
from .test_real import questions

pytestmark = pytest.mark.timeout(1200)  # software adapters compile kernels for minutes beside other tests

QUESTIONS = 6


@cache
def has_adapter() -> bool:
    code = "from mlcbuild_runtime.devices.gpu_adapter import choose; choose()"
    return (
        find_spec("wgpu") is not None
        and subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    )


@pytest.fixture(scope="module")
def gpu_bundle(webgpu_bundle: Path) -> Path:
    """Returns the bundle of the embedded model for the device webgpu. Tests must not change it."""
    if not has_adapter():
        pytest.skip("this machine has no GPU adapter, not even one in software")
    return webgpu_bundle


@pytest.fixture(scope="module")
def client(gpu_bundle: Path) -> Iterator[openai.OpenAI]:
    with (
        shared.serving(gpu_bundle) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, prompt: str, temperature: float = 0, **more: object) -> str:
    reply = client.chat.completions.create(
        model="tiny-q4f16_1",
        messages=[{"role": "user", "content": prompt}],
        temperature=temperature,
        seed=3,
        extra_body=more,
    )
    return reply.choices[0].message.content or ""


def test_it_answers_rightly_alone_and_together(client: openai.OpenAI) -> None:
    pairs = questions(QUESTIONS)
    alone = [ask(client, prompt) for prompt, _ in pairs]
    assert sum(text == answer for text, (_, answer) in zip(alone, pairs, strict=False)) >= QUESTIONS - 2, (
        alone
    )
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda pair: ask(client, pair[0]), pairs)) == alone


def test_seeds_hold_among_others(client: openai.OpenAI) -> None:
    pairs = questions(QUESTIONS)
    alone = [ask(client, prompt, 1, top_k=5) for prompt, _ in pairs]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda pair: ask(client, pair[0], 1, top_k=5), pairs)) == alone


def test_constrained_answers_keep_to_their_schema(client: openai.OpenAI) -> None:
    properties = {"a": {"enum": ["x", "y"]}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert json.loads(ask(client, "hello", response_format=form))["a"] in ("x", "y")


def test_a_device_that_is_not_there_is_named(gpu_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlcbuild_runtime.devices import gpu_adapter

    monkeypatch.setenv("MLCBUILD_DEVICE", "Voodoo 2")
    with pytest.raises(SetupError, match=r"no GPU adapter is called 'Voodoo 2'; this machine has 0: "):
        gpu_adapter.choose()


@pytest.mark.parametrize(("part", "name"), [("functions", "decode"), ("inputs", "slots"), ("sizes", "m")])
def test_a_program_without_what_is_called_is_refused(
    webgpu_bundle: Path, part: str, name: str, tmp_path: Path
) -> None:
    program = json.loads((webgpu_bundle / "program.json").read_bytes())
    if part == "sizes":  # a size that nothing else uses any more
        program["functions"].pop("mask")
        program["buffers"]["masks"]["size"] = 960
        program["sizes"].pop("m")
    else:
        program[part].pop(name)
    (tmp_path / "program.json").write_text(json.dumps(program))
    with pytest.raises(BundleError, match=rf"program.json: a program that computes text needs .*{name}.*;"):
        gpu.load(tmp_path, bundle.manifest(webgpu_bundle), None, None)


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", 864), ("hidden_size", 64), ("hidden_size", None)]
)
def test_a_program_of_another_models_sizes_is_refused(
    webgpu_bundle: Path, field: str, value: int | None
) -> None:
    manifest = bundle.manifest(webgpu_bundle)
    config = {key: item for key, item in manifest.model.config.items() if key != field}
    config |= {} if value is None else {field: value}
    with pytest.raises(
        BundleError, match=r"program.json: a row of '(logits|selected)' has [0-9]+ bytes, and"
    ):
        gpu.load(webgpu_bundle, replace(manifest, model=replace(manifest.model, config=config)), None, None)


def test_a_lost_device_is_named(gpu_bundle: Path) -> None:
    executor = gpu.load(gpu_bundle, bundle.manifest(gpu_bundle), None, None)
    assert isinstance(executor, gpu.GpuExecutor)
    step = ModelStep([1, 2, 3], [0, 3], [3], [0, 1], [0], [2], prompt=True)
    greedy = (0.0, 0.0, 1.0, 0.0, 0.0)
    (token,) = executor.step(step, [greedy]).tokens
    assert 0 <= token < executor.manifest.vocab_size
    executor.device.device.destroy()
    with pytest.raises(EngineError, match=r"failed: .*; restart the server$"):
        executor.step(step, [greedy])
    executor.close()


def measured(path: Path, **variables: str) -> dict[str, Any]:
    """Runs ci/bench/gpu for a bundle and returns the JSON document that it prints."""
    script = shared.ROOT / "ci" / "bench" / "gpu"
    result = shared.run(str(script), "--bundle", str(path), "--rounds", "1", extra=variables)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_the_benchmark_measures_every_part(webgpu_toy_bundle: Path) -> None:
    if not has_adapter():
        pytest.skip("this machine has no GPU adapter, not even one in software")
    document = measured(webgpu_toy_bundle)
    assert {"copy", "launch", "gemv", "prefill", "decode 1", "serve"} <= set(document)
    assert document["decode 1"]["launches_per_step"] == 7
    assert document["serve"]["requests"] == 8


def test_the_benchmark_ends_cleanly_without_its_adapter(webgpu_toy_bundle: Path) -> None:
    document = measured(webgpu_toy_bundle, MLCBUILD_DEVICE="Voodoo 2")
    assert list(document) == ["skipped"]
