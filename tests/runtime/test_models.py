"""Tests of several bundles in one process, and of the memory that each of them may use."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from mlcbuild_format import bundle
from mlcbuild_runtime.engine import memory_modes
from mlcbuild_runtime.engine.memory_modes import LimitOverrides
from prometheus_client.parser import text_string_to_metric_families

from . import shared
from .test_server import COMPLETION, post


def complete(server: shared.Server, **body: Any) -> Any:
    response = post(server, COMPLETION, {"max_tokens": 4, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def cards(server: shared.Server) -> dict[str, Any]:
    data = httpx.get(f"{server.url}/v1/models", timeout=shared.WAIT).json()["data"]
    return {card["id"]: card for card in data}


def test_models_by_name(toy_bundle: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(toy_bundle, tmp_path / "broken"))
    (broken / "model.so").write_bytes(b"nothing")
    missing = tmp_path / "missing"
    names = [f"fast={toy_bundle}", str(tiny_bundle), f"also={tiny_bundle}", f"bad={broken}", str(missing)]
    arguments = ["-m", "mlcbuild_runtime", *names, "--port", "0"]
    with shared.program(*arguments) as server:
        announced = f"4 models are served at {server.url} (each is loaded at its first request; mode server"
        assert announced in server.ready and "): fast, tiny-q4f16_1, also, bad, missing" in server.ready
        assert not any(card["loaded"] for card in cards(server).values())
        assert not server.health()["models"]
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
        first = complete(server, prompt="a")  # the first is the default
        assert first["model"] == "fast"
        assert complete(server, model="also", prompt="a")["model"] == "tiny-q4f16_1"
        models = cards(server)
        assert [name for name, card in models.items() if card["loaded"]] == ["fast", "tiny-q4f16_1"]
        assert models["tiny-q4f16_1"]["aliases"] == ["also"]
        assert models["fast"]["limits"]["max_batch"] == 4
        assert "bundle.json" in models["missing"]["error"]
        for name, reason in (("bad", "model.so"), ("missing", "does not exist")):
            response = post(server, COMPLETION, {"prompt": "a", "model": name})
            assert response.status_code == 500
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("model_not_loaded", "server_error")
            assert f"the model '{name}' cannot be loaded: " in error["message"]
            assert reason in error["message"]
        response = post(server, COMPLETION, {"prompt": "a", "model": "none"})
        assert response.status_code == 404
        assert "this server has 'fast', 'tiny-q4f16_1', 'also', 'bad', 'missing'" in response.text
        # Both at once: each gives what it gives alone.
        with ThreadPoolExecutor(4) as pool:
            jobs = [
                pool.submit(complete, server, model=name, prompt="abc", max_tokens=40)
                for name in ("fast", "also") * 6
            ]
            texts = [job.result()["choices"][0]["text"] for job in jobs]
        assert len(set(texts[::2])) == len(set(texts[1::2])) == 1
        assert complete(server, prompt="a")["choices"] == first["choices"]
        text = httpx.get(f"{server.url}/metrics", timeout=shared.WAIT).text
        created = {
            sample.labels["model"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "mlcbuild_answer_tokens_total"
        }
        assert set(created) == {"fast", "tiny-q4f16_1"} and min(created.values()) > 4
        assert server.stop() == 0


def needs(path: Path) -> int:
    return memory_modes.choose(LimitOverrides(), bundle.manifest(path)).memory


def test_a_stream_keeps_its_model(toy_bundle: Path, tiny_bundle: Path) -> None:
    budget = max(needs(toy_bundle), needs(tiny_bundle)) + 1
    arguments = ["-m", "mlcbuild_runtime", str(toy_bundle), "--port", "0", f"tiny={tiny_bundle}"]
    with (  # A bundle may stand after an option.
        shared.program(*arguments, "--memory", f"{budget / 1000}kB") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for name in ("toy-q0f32-host", "tiny") * 2:
            stream = client.completions.create(model=name, prompt="abc", stream=True, max_tokens=30)
            next(iter(stream))
            other = "tiny" if name.startswith("toy") else "toy-q0f32-host"
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")
            assert complete(server, model=other, prompt="a")["model"] == other
            assert [card["loaded"] for card in cards(server).values()].count(True) == 1


def test_what_was_chosen_is_told(toy_bundle: Path) -> None:
    with shared.serving(toy_bundle, "--mode", "interactive", "--prefill-chunk", "16") as server:
        assert "context 256, batch 1, prefill 16, mode interactive, memory" in server.ready
        (card,) = cards(server).values()
        assert card["limits"] == {
            "mode": "interactive",
            "max_batch": 1,
            "kv_pages": 16,
            "prefill_chunk": 16,
            "memory": card["limits"]["memory"],
        }
        assert complete(server, prompt="x" * 100)["usage"]["prompt_tokens"] == 101


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1kB"], "but the memory for bundles is 1.0 kB: give it more, or --max-pages"),
        (["--memory", "much"], "must be a size such as 8GB or 512MiB, found 'much'"),
        (["--memory", "1KiB"], "but the memory for bundles is 1.0 kB: give it more, or --max-pages"),
        (["--memory", "0B"], "must be at least 1 byte, found '0B'"),
        (["--mode", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_options_that_cannot_be(toy_bundle: Path, options: list[str], message: str) -> None:
    result = shared.run("-m", "mlcbuild_runtime", str(toy_bundle), "--port", "0", *options)
    assert result.returncode in (2, 3)
    assert message in result.stderr
