"""Tests of the HTTP application's answers when the model or the engine fails, without a socket."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.executor import Executor, StepOutput
from mlcbuild_runtime.executor.sampling_params import SamplingRow
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.server import create_app
from mlcbuild_runtime.openai.service import CompletionJob
from mlcbuild_runtime.text import turns
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import shared
from .wrapped import Stepwise, is_decode

POISON = 111


class Faulty(Stepwise):
    """An executor that fails when it meets the token POISON, or when a decoding sequence has reached a length
    of 4 tokens."""

    def step(self, step: ModelStep, params: Sequence[SamplingRow], masks: Any = ()) -> StepOutput:
        if POISON in step.tokens or (is_decode(step) and 4 in step.lengths):
            raise RuntimeError("a kernel has failed")
        return self.inner.step(step, params, masks)


@pytest.fixture
def engine(toy_bundle: Path) -> Iterator[Engine]:
    executor = loading.load(toy_bundle)
    tokenizer = Tokenizer.load(toy_bundle, executor.manifest.serving)
    running = Engine(cast(Executor, Faulty(executor)), tokenizer).start()
    yield running
    running.close()


def send(engine: Engine, requests: Sequence[tuple[str, str, object]]) -> list[httpx.Response]:
    """Sends requests one after the other to the server's application, in this process and without a socket,
    and returns the responses. requests: (method, path, body) of each; engine: the engine that answers
    them."""

    async def talk() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(engine), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(talk())


def complete(engine: Engine, body: object) -> httpx.Response:
    return send(engine, [("POST", "/v1/completions", body)])[0]


def test_requests_wait_by_their_clients_address(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that requests to compile constraints and to render templates carry the client's address, because
    addresses are served in turn (see text/turns.py)."""
    addresses = []

    def chat(engine: Engine, body: Mapping[str, Json]) -> CompletionJob:
        addresses.append(turns.client.get())
        raise RequestError("not now")

    monkeypatch.setattr("mlcbuild_runtime.openai.service.chat", chat)
    monkeypatch.setattr("mlcbuild_runtime.openai.service.tokenize", chat)
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    bodies = {"/v1/chat/completions": messages, "/v1/responses": {"input": "hi"}, "/tokenize": messages}
    for path, body in bodies.items():
        assert send(engine, [("POST", path, body)])[0].status_code == 400, path
    assert addresses == ["127.0.0.1"] * 3  # what httpx gives to applications


def test_a_failing_model_is_a_500_and_others_go_on(engine: Engine) -> None:
    response = complete(engine, {"prompt": [POISON]})
    assert response.status_code == 500
    assert response.json() == {
        "error": {
            "message": "the model has failed: a kernel has failed",
            "type": "server_error",
            "param": None,
            "code": None,
        }
    }
    assert complete(engine, {"prompt": [1], "max_tokens": 1}).status_code == 200


def test_a_failure_within_a_stream_is_an_event(engine: Engine) -> None:
    response = complete(engine, {"prompt": [112], "stream": True})
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert "error" not in json.loads(events[0])
    assert json.loads(events[-2])["error"]["message"] == "the model has failed: a kernel has failed"
    assert events[-1] == "[DONE]"


def test_a_defect_is_a_500_without_details(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> list[int]:
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr(engine.tokenizer, "encode", broken)
    response = complete(engine, {"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the server has failed: see its log"


def test_a_thread_that_cannot_start_is_a_503(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        response = complete(engine, {"prompt": [1], "max_tokens": 1})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "overloaded"
    assert complete(engine, {"prompt": [1], "max_tokens": 1}).status_code == 200


def test_every_answer_with_an_error_is_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr(engine.tokenizer, "encode", broken)
    key, out = {"Authorization": "Bearer one", "Origin": "http://a"}, io.StringIO()
    requests: list[tuple[str, str, object, dict[str, str]]] = [
        ("GET", "/v1/models", None, key),
        ("GET", "/v1/models", None, {}),
        ("GET", "/nowhere", None, key),
        ("GET", "/v1/completions", None, key),
        ("POST", "/v1/completions", {"prompt": 1.5}, key),
        ("POST", "/v1/completions", {"prompt": "x"}, key),
        ("GET", "/metrics", None, key),
    ]

    async def talk() -> list[httpx.Response]:
        app = create_app(engine, Access(keys=("one",), origins=("http://a",)), [(out, "json")])
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [await client.request(m, path, json=body, headers=h) for m, path, body, h in requests]

    *answers, metrics = asyncio.run(talk())
    assert [answer.status_code for answer in answers] == [200, 401, 404, 405, 400, 500]
    defect, line = answers[-1], json.loads(out.getvalue().splitlines()[5])
    assert (defect.headers["x-request-id"], defect.status_code) == (line["id"], line["status"])
    assert defect.headers["access-control-allow-origin"] == "http://a"
    lines = [line for line in metrics.text.splitlines() if line.startswith("mlcbuild_errors_total")]
    expected = [f'mlcbuild_errors_total{{status="{status}"}} 1.0' for status in (400, 401, 404, 405, 500)]
    assert sorted(lines) == expected


def test_a_client_that_has_left_gets_no_answer(engine: Engine) -> None:
    """Checks the application's messages if the client disconnects while it sends a body: none, so that the
    access log has no status and the metrics count no error."""
    sent = list[Any]()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def keep(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    out = io.StringIO()

    async def talk() -> None:
        app = create_app(engine, access_logs=[(out, "json")])
        await app({**scope, "query_string": b"", "server": ("server", 80)}, receive, keep)

    asyncio.run(talk())
    assert sent == []
    assert json.loads(out.getvalue())["status"] is None


def test_after_the_end_of_the_engine(engine: Engine) -> None:
    engine.close()
    health, answer = send(engine, [("GET", "/health", None), ("POST", "/v1/completions", {"prompt": [1]})])
    assert (health.status_code, health.json()["status"]) == (503, "stopped")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the engine is stopped"


def test_too_many_requests_are_a_503(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._intake, "max_waiting", 0)
    response = complete(engine, {"prompt": [1]})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "overloaded"
    assert response.json()["error"]["type"] == "server_error"


SLOW = """
import sys, time
from mlcbuild_runtime.devices import cpu
from mlcbuild_runtime.http import serve
def slowly(self, *given):
    print("working", flush=True)
    time.sleep(120)
cpu.CpuExecutor.step = slowly
sys.exit(serve.serve(sys.argv[1], serve.ServerOptions(port=0)))
"""


def test_a_signal_does_not_wait_for_a_long_step(toy_bundle: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(toy_bundle)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=shared.environment()) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[5]
            with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": [1], "stream": True}):
                assert process.stdout.readline() == "working\n"
                process.send_signal(signal.SIGINT)
                assert process.wait(shared.WAIT) == 0, "the step takes twice as long"
        finally:
            process.kill()
