"""Tests of additional fields and endpoints of the API, with real server processes."""

from __future__ import annotations

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from mlcbuild_runtime.text.tokenizer import Tokenizer
from prometheus_client.parser import text_string_to_metric_families

from . import shared
from .shared import Server
from .test_serve import LONG
from .test_server import HI, post, text_of


def complete(server: Server, **body: Any) -> Any:
    response = post(server, "/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_several_answers(client: openai.OpenAI, server: Server) -> None:
    def ask(n: int) -> Any:
        return client.completions.create(
            model=server.name, prompt="abc" * 9, n=n, seed=1, temperature=1.5, max_tokens=9
        )

    three, one = ask(3), ask(1)
    texts = [choice.text for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == one.choices[0].text
    assert three.usage.prompt_tokens == one.usage.prompt_tokens == 28
    assert three.usage.completion_tokens == 27
    assert one.usage.prompt_tokens_details.cached_tokens == 16
    stream = client.completions.create(
        model=server.name, prompt="abc" * 9, n=3, seed=1, temperature=1.5, max_tokens=9, stream=True
    )
    streamed = ["", "", ""]
    for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_several_chats_with_usage(client: openai.OpenAI, server: Server) -> None:
    chunks = list(
        client.chat.completions.create(
            model=server.name,
            messages=HI,
            n=2,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    roles = [c.choices[0].index for c in chunks[:-1] if c.choices[0].delta.role]
    assert sorted(roles) == [0, 1]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10


def test_several_prompts(server: Server, toy_bundle: Path) -> None:
    tokenizer = Tokenizer.load(toy_bundle)
    answer = complete(server, prompt=["one", "two", "three"], max_tokens=5, n=2)
    texts = [text_of(toy_bundle, tokenizer.encode(text), 5) for text in ("one", "two", "three")]
    assert [choice["text"] for choice in answer["choices"]] == [text for text in texts for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 4 + 4 + 6
    by_tokens = complete(server, prompt=[tokenizer.encode("one"), tokenizer.encode("two")], max_tokens=5)
    assert [choice["text"] for choice in by_tokens["choices"]] == texts[:2]


def test_echo(client: openai.OpenAI, server: Server) -> None:
    plain = complete(server, prompt="hello", max_tokens=5)["choices"][0]["text"]
    assert complete(server, prompt="hello", max_tokens=5, echo=True)["choices"][0]["text"] == f"hello{plain}"
    tokens = post(server, "/tokenize", {"prompt": "hello"}).json()["tokens"]
    by_tokens = complete(server, prompt=tokens, max_tokens=5, echo=True)
    assert by_tokens["choices"][0]["text"] == f"hello{plain}"
    stream = client.completions.create(
        model=server.name, prompt="hello", max_tokens=5, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == f"hello{plain}"


def test_penalties_and_biases_change_the_answer(server: Server) -> None:
    def text(**more: Any) -> str:
        return str(
            complete(server, prompt="p", max_tokens=120, ignore_eos=True, **more)["choices"][0]["text"]
        )

    plain = text()
    assert len(set(plain)) < len(plain)
    # The toy's logits are half a unit apart: the strongest penalty moves a repeated choice.
    for change in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        assert text(**change) != plain, change
    assert text(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, logit_bias={}) == plain
    x = str(ord("x") - ord("!"))  # the byte-level alphabet begins with "!"
    body = {"prompt": "p", "max_tokens": 3, "logit_bias": {x: 100}}
    letter = post(server, "/detokenize", {"tokens": [int(x)]}).json()["prompt"]
    assert complete(server, **body)["choices"][0]["text"] != text()[:3]
    assert letter in complete(server, **body)["choices"][0]["text"]


def test_tokenize_and_back(server: Server, toy_bundle: Path) -> None:
    tokenizer = Tokenizer.load(toy_bundle)
    document = post(server, "/tokenize", {"prompt": "héllo", "model": server.name}).json()
    assert document == {"tokens": tokenizer.encode("héllo"), "count": 7, "max_model_len": 256}
    bare = post(server, "/tokenize", {"prompt": "héllo", "add_special_tokens": False}).json()
    assert bare["tokens"] == document["tokens"][1:]
    assert post(server, "/detokenize", {"tokens": document["tokens"]}).json()["prompt"] == "héllo"
    chat = post(server, "/tokenize", {"messages": HI}).json()
    assert chat["tokens"] == tokenizer.chat(HI)


def samples(server: Server) -> dict[str, float]:
    response = httpx.get(f"{server.url}/metrics", timeout=shared.WAIT)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + sample.labels.get("reason", "") + sample.labels.get("status", ""): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics(toy_bundle: Path) -> None:
    with shared.serving(toy_bundle) as server:
        for _ in range(2):
            complete(server, prompt=list(range(40)), max_tokens=5)
        post(server, "/v1/completions", {"prompt": [300]})
        metrics = samples(server)
    assert metrics["mlcbuild_requests_totallength"] == 2
    assert metrics["mlcbuild_prompt_tokens_total"] == 40 + 8
    assert metrics["mlcbuild_prompt_tokens_cached_total"] == 32
    assert metrics["mlcbuild_answer_tokens_total"] == 10
    assert metrics["mlcbuild_first_token_seconds_count"] == metrics["mlcbuild_token_seconds_count"] == 2
    assert 0 < metrics["mlcbuild_first_token_seconds_sum"] <= metrics["mlcbuild_request_seconds_sum"]
    assert metrics["mlcbuild_kv_pages"] == metrics["mlcbuild_kv_pages_free"] == 64
    assert metrics["mlcbuild_kv_pages_cached"] == 2
    assert metrics["mlcbuild_requests_running"] == metrics["mlcbuild_requests_waiting"] == 0
    assert metrics["mlcbuild_preemptions_total"] == 0
    assert metrics["mlcbuild_decode_steps_total"] == 8, "the first of five tokens is of the prefill"
    assert metrics["mlcbuild_errors_total400"] == 1


def test_keys_and_origins(toy_bundle: Path) -> None:
    options = ("--api-key", "first", "--api-key", "sécond", "--cors", "https://page.example")
    with shared.serving(toy_bundle, *options, extra={"MLCBUILD_API_KEY": "third"}) as server:
        for path in ("/v1/models", "/metrics", "/no/such/path"):
            refused = httpx.get(f"{server.url}{path}")
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for path in ("/", "/docs", "/openapi.json", "/health", "/health/live", "/health/ready"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        for key in ("first", "sécond", "third"):
            headers = {b"Authorization": f"Bearer {key}".encode()}
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="first") as client:
            assert client.models.list().data
        for wrong in (b"Bearer firs", b"Bearer", b"Basic first", b"first", b"Bearer \xff"):
            reply = httpx.get(f"{server.url}/v1/models", headers={b"Authorization": wrong})
            assert reply.status_code == 401, wrong
        asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        leave = httpx.options(f"{server.url}/v1/chat/completions", headers=asks)
        assert leave.headers["access-control-allow-origin"] == "https://page.example"
        other = httpx.options(
            f"{server.url}/v1/chat/completions", headers={**asks, "Origin": "https://other.example"}
        )
        assert "access-control-allow-origin" not in other.headers


def test_the_page_is_one_file_and_asks_only_this_server(server: Server) -> None:
    response = httpx.get(f"{server.url}/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    text = response.text
    assert not re.search(r"https?:|//[a-z]|src=|href=|@import|innerHTML|eval", text.partition("<style>")[2])
    used = set(re.findall(r"""\$\("(\w+)"\)""", text))
    assert used <= set(re.findall(r'id="(\w+)"', text)), "every element that the script names is there"
    for path in re.findall(r"""fetch\("([^"]+)\"""", text):
        assert httpx.get(f"{server.url}/{path}").status_code in (200, 405), path


def test_limits_of_time_and_queue(toy_bundle: Path) -> None:
    limits = ("--timeout", "0.000001", "--max-waiting", "1")
    with shared.serving(toy_bundle, *limits) as server:
        late = post(server, "/v1/completions", {"prompt": [1], "max_tokens": 255})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert late.json()["error"]["type"] == "server_error"
        full = post(server, "/v1/completions", {"prompt": [[1], [2], [3], [4]], "max_tokens": 255})
        assert full.status_code in (503, 504)


def test_limits_of_bodies_and_answers(toy_bundle: Path) -> None:
    with shared.serving(toy_bundle, "--max-body", "1kB", "--max-tokens", "7") as server:
        body = {"prompt": "x", "ignore_eos": True}
        large = post(server, "/v1/completions", {**body, "prompt": "x" * 1000})
        assert (large.status_code, large.json()["error"]["message"]) == (
            413,
            "the body has more than 1000 bytes",
        )
        for more, count in (({}, 7), ({"max_tokens": 8}, 7), ({"max_tokens": 3}, 3)):
            assert complete(server, **body, **more)["usage"]["completion_tokens"] == count
        chat = post(server, "/v1/chat/completions", {"messages": HI, "ignore_eos": True}).json()
        assert (chat["usage"]["completion_tokens"], chat["choices"][0]["finish_reason"]) == (7, "length")
        size = len("x" * 250) + 1
        near = complete(server, **{**body, "prompt": "x" * 250}, max_tokens=256 - size)
        assert near["usage"]["completion_tokens"] == 256 - size


@pytest.mark.parametrize("option", [("--timeout", "-1"), ("--drain", "inf"), ("--max-waiting", "-1")])
def test_limits_that_make_no_sense(toy_bundle: Path, option: tuple[str, str]) -> None:
    result = shared.run("-m", "mlcbuild_runtime", str(toy_bundle), *option)
    assert result.returncode == 2
    assert f"argument {option[0]}: must be " in result.stderr


PYTHON = ("-m", "tests.runtime.text_program")
"""Arguments of Python that run a program's text in a forked process."""
SLOW = """
import sys, time
from mlcbuild_runtime.devices import cpu
from mlcbuild_runtime.http import serve
plain = cpu.CpuExecutor.step
def slowly(self, *given):
    time.sleep(0.02)
    return plain(self, *given)
cpu.CpuExecutor.step = slowly
sys.exit(serve.serve(sys.argv[1], serve.ServerOptions(port=0, drain=float(sys.argv[2]))))
"""


@pytest.mark.parametrize(("drain", "whole"), [("60", True), ("0.2", False), ("0", False)])
def test_a_termination_lets_requests_end(toy_bundle: Path, drain: str, whole: bool) -> None:
    with shared.program(*PYTHON, SLOW, str(toy_bundle), drain) as server, ThreadPoolExecutor(1) as pool:
        body = {**LONG, "max_tokens": 120}
        job = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=shared.WAIT)
        end = time.monotonic() + shared.WAIT
        while not server.health()["running"]:
            assert time.monotonic() < end
        server.process.send_signal(signal.SIGTERM)
        if whole:
            while httpx.get(f"{server.url}/health/ready", verify=shared.PLAIN).status_code == 200:
                assert time.monotonic() < end
            refused = post(server, "/v1/completions", {"prompt": [1]})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "stopping"
        assert server.process.wait(shared.WAIT) == 0
        text = job.result().text
        assert ('"finish_reason":"length"' in text) is whole
        assert ("the server is stopping" in text) is not whole


def test_a_second_signal_does_not_wait(toy_bundle: Path) -> None:
    with shared.program(*PYTHON, SLOW, str(toy_bundle), "60") as server, ThreadPoolExecutor(1) as pool:
        job = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=shared.WAIT)
        end = time.monotonic() + shared.WAIT
        while not server.health()["running"]:
            assert time.monotonic() < end
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/health/ready", verify=shared.PLAIN).status_code == 200:
            assert time.monotonic() < end
        assert server.stop(signal.SIGTERM) == 0
        assert "the server is stopping" in job.result().text
