"""Tests of the lines of the access log, without a server."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.executor.sampling_params import Sampling
from mlcbuild_runtime.http.accesslog import AccessLog, AccessRecord, Form, record


def logged(
    app: Any, headers: tuple[tuple[str, str], ...] = (), path: str = "/v1/x", form: Form = "json"
) -> Any:
    """Sends one request through the access log's middleware. Returns (the text of the log, the messages that
    the application sends)."""
    out, messages = io.StringIO(), list[Any]()

    async def send(message: Any) -> None:
        messages.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": "GET", "path": path, "headers": raw, "client": ("127.0.0.1", 5)}
    asyncio.run(AccessLog(app, out, form)(scope, None, send))  # type: ignore[arg-type]
    return out.getvalue(), messages


async def found(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})


def test_a_request_without_a_model_has_a_short_line() -> None:
    text, (start,) = logged(found, (("x-request-id", "abc"),))
    line = json.loads(text)
    assert text.endswith("}\n") and line.pop("time").endswith("+00:00") and line.pop("seconds") >= 0
    assert line == {"id": "abc", "client": "127.0.0.1", "method": "GET", "path": "/v1/x", "status": 204}
    assert (b"x-request-id", b"abc") in start["headers"]


@pytest.mark.parametrize("id", ["", "a b", "x" * 129, "\x7f"])
def test_an_id_that_is_no_word_is_replaced(id: str) -> None:
    text, (start,) = logged(found, (("x-request-id", id),))
    new_id = json.loads(text)["id"]
    assert len(new_id) == 32 and (b"x-request-id", new_id.encode()) in start["headers"]


def test_a_client_that_left_has_no_status() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("gone")

    out = io.StringIO()
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    with pytest.raises(RuntimeError):
        asyncio.run(AccessLog(app, out)(scope, None, None))  # type: ignore[arg-type]
    line = json.loads(out.getvalue())
    assert line["status"] is None and line["client"] is None


def test_the_answers_of_a_model() -> None:
    passed: list[Event] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        access_record = record(scope)
        requests = [Request((1, 2, 3), sampling=Sampling(choice=choice)) for choice in range(3)]
        access_record.model("tiny", requests, True)
        first, second, _ = (access_record.watched(passed.append) for _ in requests)
        first(Event("a", 1, cached=2))
        first(Event("b", 2, "stop", cached=2))
        second(Event(tokens=4, error=EngineError("broken"), cached=1))
        await found(scope, receive, send)

    line = json.loads(logged(app)[0])
    assert (line["model"], line["stream"], line["prompt_tokens"]) == ("tiny", True, 3)
    assert (line["cached_tokens"], line["answer_tokens"]) == (1, 6)
    assert line["finish"] == ["stop", "error", None]
    assert 0 <= line["ttft"] <= line["seconds"]
    assert [event.text for event in passed] == ["a", "b", ""]


def test_cached_tokens_are_those_of_all_prompts() -> None:
    """Checks two prompts with two answers each, of which one has no event, and a third prompt that is
    submitted later: the log states the same sum as `usage` of a response."""
    access_record = AccessRecord()
    requests = [Request(prompt, sampling=Sampling(choice=c)) for prompt in ((1, 2), (3,) * 9) for c in (0, 1)]
    cached = [0, 1, 8, None, 3]
    for wave in (requests, [Request((4,) * 5)]):
        access_record.model("tiny", wave, False)
        for _ in wave:
            number = cached.pop(0)
            take = access_record.watched(lambda event: None)
            if number is not None:
                take(Event("a", 1, "stop", cached=number))
    fields = access_record.fields()
    assert (fields["prompt_tokens"], fields["cached_tokens"]) == (2 + 9 + 5, 0 + 8 + 3)


def test_without_a_token_there_is_no_time_to_the_first() -> None:
    access_record = AccessRecord()
    access_record.model("tiny", [Request((1,))], False)
    access_record.watched(lambda event: None)(Event(error=EngineError("broken")))
    assert "ttft" not in access_record.fields() and access_record.fields()["answer_tokens"] == 0


def test_lines_for_people() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        record(scope).model("tiny", [Request((1, 2, 3))], False)
        record(scope).watched(lambda event: None)(Event("a", 7, "stop", cached=2))
        await found(scope, receive, send)

    text, _ = logged(app, path="/v1/a\x1bb", form="text")
    assert " 204 GET /v1/a\\x1bb in 0.00 s, tiny: 3 (2 cached) + 7 tokens\n" in text
    assert logged(found, path="/health", form="text")[0] == "" != logged(found, path="/health")[0]


def test_control_characters_are_escaped() -> None:
    text, _ = logged(found, path="/\x1b\x7f\n")
    assert text.count("\n") == 1 and "\x1b" not in text and "\x7f" not in text
    assert json.loads(text)["path"] == "/\x1b\x7f\n"


def test_a_log_that_cannot_be_written_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    log = AccessLog(found, out)
    out.close()

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            asyncio.run(log({**scope}, None, send))  # type: ignore[arg-type]
    assert len(caplog.records) == 1 and "the access log cannot be written" in caplog.text


def test_other_scopes_pass() -> None:
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    asyncio.run(AccessLog(app, io.StringIO())({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert reached == ["lifespan"]
