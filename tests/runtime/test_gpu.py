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
from mlcbuild_format.errors import BundleError, DeviceLostError, EngineError, SetupError
from mlcbuild_runtime.devices import gpu
from mlcbuild_runtime.devices.gpu_program import DeviceProgram
from mlcbuild_runtime.executor.batch import ModelStep

from . import shared
from .test_real import questions

pytestmark = pytest.mark.timeout(1200)  # software adapters compile kernels for minutes beside other tests

QUESTIONS = 6

ONE_SERVER = pytest.mark.xdist_group("gpu-server")
"""Makes tests run in the same process, with one server: to compile its kernels takes 4 CPU seconds."""


@cache
def has_adapter() -> bool:
    code = "from mlcbuild_runtime.devices.gpu_adapter import choose; choose()"
    return (
        find_spec("wgpu") is not None
        and subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    )


@pytest.fixture(scope="module")
def gpu_bundle(webgpu_bundle: Path) -> Path:
    """Returns the directory of a bundle of the small model in the repository (recipes/models/tiny) for the
    device webgpu. Skips the test if this machine has no GPU adapter. Tests must not change the bundle."""
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


@ONE_SERVER
def test_it_answers_rightly_alone_and_together(client: openai.OpenAI) -> None:
    pairs = questions(QUESTIONS)
    alone = [ask(client, prompt) for prompt, _ in pairs]
    assert sum(text == answer for text, (_, answer) in zip(alone, pairs, strict=False)) >= QUESTIONS - 2, (
        alone
    )
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda pair: ask(client, pair[0]), pairs)) == alone


@ONE_SERVER
def test_seeds_hold_among_others(client: openai.OpenAI) -> None:
    pairs = questions(QUESTIONS)
    alone = [ask(client, prompt, 1, top_k=5) for prompt, _ in pairs]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda pair: ask(client, pair[0], 1, top_k=5), pairs)) == alone


@ONE_SERVER
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


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("page_size", 8, "16 tokens in a page of the KV cache"),
        ("prefill_chunk", 512, "rows in a call"),
        ("max_batch", 3, "pages of KV cache"),
        ("context_window", 255, "256 positions in a table"),
    ],
)
def test_a_program_of_other_limits_is_refused(webgpu_bundle: Path, field: str, value: int, what: str) -> None:
    """Checks that a GPU program is refused if the manifest has other limits than those for which it was
    compiled, because its kernels would use other places in the KV cache than the engine."""
    manifest = bundle.manifest(webgpu_bundle)
    limits: Any = {field: value}
    with pytest.raises(BundleError, match=rf"program.json: the program has .*{what}, and the limits in bun"):
        gpu.load(webgpu_bundle, replace(manifest, limits=replace(manifest.limits, **limits)), None, None)


def test_a_lost_device_is_named(webgpu_toy_bundle: Path) -> None:
    if not has_adapter():
        pytest.skip("this machine has no GPU adapter, not even one in software")
    executor = gpu.load(webgpu_toy_bundle, bundle.manifest(webgpu_toy_bundle), None, None)
    assert isinstance(executor, gpu.GpuExecutor)
    step = ModelStep([1, 2, 3], [0, 3], [3], [0, 1], [0], [2], prompt=True)
    greedy = (0.0, 0.0, 1.0, 0.0, 0.0)
    (token,) = executor.step(step, [greedy]).tokens
    assert 0 <= token < executor.manifest.vocab_size

    def fail() -> None:
        raise RuntimeError("once")

    with pytest.raises(EngineError, match=r"failed: once$") as caught:
        executor.device._guarded(fail)
    assert not isinstance(caught.value, DeviceLostError)
    executor.device.device.destroy()
    with pytest.raises(DeviceLostError, match=r"failed: .*; restart the server$"):
        executor.step(step, [greedy])
    executor.close()


def test_a_device_lost_while_weights_are_uploaded_is_named(
    gpu_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = DeviceProgram._upload

    def interrupted(program: DeviceProgram, *arguments: Any) -> None:
        program.device.destroy()
        upload(program, *arguments)

    monkeypatch.setattr(DeviceProgram, "_upload", interrupted)
    with pytest.raises(EngineError, match=r"failed: .*; restart the server$"):
        gpu.load(gpu_bundle, bundle.manifest(gpu_bundle), None, None)


def measured(path: Path, out: Path, *options: str, **variables: str) -> dict[str, Any]:
    """Runs the benchmark ci/bench/gpu on the bundle at `path` and returns its JSON document. Asserts that it
    succeeds and that the file `out` has the document that it prints. options: further arguments; variables:
    environment variables."""
    script = shared.ROOT / "ci" / "bench" / "gpu"
    fixed = map(str, (sys.executable, script, "--bundle", path, "--rounds", 1, "--out", out))
    result = subprocess.run(
        [*fixed, *options],
        capture_output=True,
        text=True,
        env=shared.environment(variables),
        timeout=shared.WAIT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(out.read_text())
    assert document == json.loads(result.stdout)
    return document


def test_the_benchmark_measures_every_part_and_survives_one(webgpu_toy_bundle: Path, tmp_path: Path) -> None:
    if not has_adapter():
        pytest.skip("this machine has no GPU adapter, not even one in software")
    missing = ("--gguf", str(tmp_path / "missing.gguf"))
    document = measured(webgpu_toy_bundle, tmp_path / "figures.json", *missing)
    (program,) = document["programs"].values()
    parts = {"load", "copy", "launch", "gemv", "prefill", "decode 1", "serve"}
    assert set(program["features"]) == parts
    assert set(program["plain"]) == {"load", "gemv", "prefill", "decode 1"}
    assert program["plain"]["decode 1"]["launches_per_step"] == 7
    assert program["features"]["serve"]["requests"] == 8
    assert list(document["llama.cpp"]) == ["failed"]
    assert "stopped" not in document


def test_the_benchmark_ends_when_its_time_is_over(webgpu_toy_bundle: Path, tmp_path: Path) -> None:
    if not has_adapter():
        pytest.skip("this machine has no GPU adapter, not even one in software")
    text = json.dumps(measured(webgpu_toy_bundle, tmp_path / "figures.json", "--seconds", "0.1"))
    # It ends at once, or, where it was faster, begins no part.
    assert "the time was over during '" in text or text.count("the time is over") == 2
    assert "gigabytes" not in text


def test_the_benchmark_ends_cleanly_without_its_adapter(webgpu_toy_bundle: Path, tmp_path: Path) -> None:
    document = measured(webgpu_toy_bundle, tmp_path / "figures.json", MLCBUILD_DEVICE="Voodoo 2")
    assert list(document) == ["skipped"]
