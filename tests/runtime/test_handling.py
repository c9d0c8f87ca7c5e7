"""Tests of the steps that all endpoints have in common: bodies, limits, models, and submitting requests."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.engine.request import Request as EngineRequest
from mlcbuild_runtime.engine.served_models import Models
from mlcbuild_runtime.http import accesslog, handling
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.handling import RequestHandling
from mlcbuild_runtime.http.metrics import Metrics
from mlcbuild_runtime.openai.service import CompletionJob
from mlcbuild_runtime.text import turns
from starlette.requests import Request

from .test_streams import Submitted

CHAT = "/v1/chat/completions"
LIMITS = SimpleNamespace(context_window=64)


class Submitting(Submitted):
    """A stand-in for the engine that stores the submitted requests, returns no answers, and has a context of
    64 tokens."""

    name, manifest = "tiny", SimpleNamespace(limits=LIMITS)

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[EngineRequest] = []

    def submit(self, request: EngineRequest, sink: Any, window: int) -> Any:
        self.requests.append(request)
        return super().submit(request, sink, window)


class Lending:
    """A stand-in for a server's table of models. It has one model, which counts as loaded from the first
    request on; `users` is the number of requests that use it now."""

    def __init__(self) -> None:
        self.engine = cast(Engine, Submitting())
        self.is_loaded, self.users, self.names = False, 0, list[object]()

    def at_once(self, name: object) -> Any:
        return self.use(name) if self.is_loaded else None

    def use(self, name: object) -> Any:
        self.is_loaded, self.users = True, self.users + 1
        self.names.append(name)
        return SimpleNamespace(engine=self.engine, end=self._end)

    def _end(self) -> None:
        self.users -= 1


def handler(models: Lending | None = None, **access: Any) -> RequestHandling:
    lending: Any = models or Lending()
    return RequestHandling(cast(Models, lending), Access(**access), Metrics(dict))


def request(body: bytes = b"{}", path: str = CHAT) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "path": path, "headers": [], "client": ("10.0.0.7", 1)}, receive)


def parsed(handling: RequestHandling, body: bytes, path: str = CHAT) -> dict[str, Json]:
    async def run() -> dict[str, Json]:
        async with handling.body(request(body, path)) as parsed:
            return parsed

    return asyncio.run(run())


def test_fields_are_dropped_only_with_lenient(caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"model": "m", "colour": 1, "max_new_tokens": 3}'
    whole = {"model": "m", "colour": 1, "max_new_tokens": 3}
    with caplog.at_level(logging.WARNING):
        assert parsed(handler(), body) == whole
        assert parsed(handler(lenient=True), body, "/nowhere") == whole
        assert not caplog.messages
        assert parsed(handler(lenient=True), body) == {"model": "m", "max_tokens": 3}
    assert caplog.messages == [f"{CHAT}: dropped fields: colour"]


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        ("/v1/messages", {"thinking": {"type": "disabled"}, "odd": 1}, {"thinking": {"type": "disabled"}}),
        ("/completion", {"n_predict": 3, "odd": 1}, {"max_tokens": 3}),
        ("/completion", {"max_tokens": 3}, {"max_tokens": 3}),
    ],
)
def test_lenient_keeps_the_fields_of_an_endpoint(
    path: str, body: dict[str, Json], kept: dict[str, Json]
) -> None:
    assert parsed(handler(lenient=True), json.dumps(body).encode(), path) == kept


def test_a_body_has_the_maximum_size_of_the_options() -> None:
    assert parsed(handler(max_body=8), b'{"a": 1}') == {"a": 1}
    with pytest.raises(RequestError, match="more than 7 bytes"):
        parsed(handler(max_body=7), b'{"a": 1}')


def prepared(handling: RequestHandling, body: Mapping[str, Json], seconds: float = 0.0) -> Any:
    """Calls the function that prepares requests for the engine, and returns what its thread observes:
    (client's address, number of bodies whose constraints are being compiled, number whose templates are being
    rendered, id of the thread). seconds: how long the preparation sleeps."""

    def prepare(engine: Engine, body: Mapping[str, Json]) -> CompletionJob:
        time.sleep(seconds)
        limiters = handling._compiling, handling._rendering
        counts = [limiter.borrowed_tokens for limiter in limiters]
        return cast(CompletionJob, (turns.client.get(), *counts, threading.get_ident()))

    async def run() -> object:
        sender = request()
        async with handling.body(sender):
            return await handling.prepared(sender, prepare, cast(Engine, Submitting()), body)

    return asyncio.run(run())


FORMAT: Json = {"type": "json_object"}
MESSAGES: Json = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        ({"prompt": "a"}, (0, 0)),
        ({"messages": MESSAGES}, (0, 1)),
        ({"messages": MESSAGES, "response_format": FORMAT}, (1, 0)),
        ({"prompt": "a", "tools": [{}]}, (1, 0)),
    ],
)
def test_constraints_and_templates_have_threads_of_their_own(
    body: dict[str, Json], counts: tuple[int, int]
) -> None:
    address, *actual, thread = prepared(handler(), body)
    assert (address, tuple(actual)) == ("10.0.0.7", counts)
    assert thread != threading.get_ident()


def test_too_many_constraints_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "MAX_COMPILING", 0)
    with pytest.raises(RequestError, match="0 requests with constraints are waiting") as caught:
        prepared(handler(), {"response_format": FORMAT})
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert prepared(handler(), {"messages": MESSAGES})[2] == 1, "other requests are not refused"


def test_a_request_s_time_limit_holds_while_it_is_prepared() -> None:
    with pytest.raises(RequestError, match=r"not finished after 0\.01 s") as caught:
        prepared(handler(timeout=0.01), {"prompt": "a"}, seconds=0.05)
    assert (caught.value.status, caught.value.code) == (504, "timeout")


def test_a_thread_counts_until_it_ends() -> None:
    """Checks that the number of threads stays limited after requests have reached their time limit."""
    handling, going = handler(timeout=0.01), threading.Event()

    async def run() -> None:
        with pytest.raises(RequestError, match="not finished"):
            async with handling.body(sender := request()):
                work = lambda *_: going.wait(60)  # noqa: E731
                await handling.threaded(sender, work, cast(Engine, None), {"messages": MESSAGES})
        assert handling._rendering.borrowed_tokens == 1
        going.set()
        while handling._rendering.borrowed_tokens:
            await asyncio.sleep(0.001)

    asyncio.run(run())


def test_a_request_has_one_time_limit() -> None:
    """Checks that the time in which a body arrives, and that of earlier parts of a request for embeddings,
    count towards the time limit of the rest."""
    engine, handling = Submitting(), handler(timeout=9.0)

    async def run() -> None:
        sender = request()
        async with handling.body(sender):
            await asyncio.sleep(0.01)
        for _ in range(2):
            handling.submit(sender, cast(Engine, engine), [EngineRequest((1,))])
            await asyncio.sleep(0.01)

    asyncio.run(run())
    (deadline,) = {submitted.deadline for submitted in engine.requests}
    assert deadline is not None and deadline.seconds == 9.0 and deadline.left < 8.98


def test_a_load_goes_on_after_the_time_limit() -> None:
    models, going = Lending(), threading.Event()
    use, models.use = models.use, lambda name: use(name) if going.wait(9) else None  # type: ignore[method-assign]

    async def run() -> None:
        handling = handler(models, timeout=0.01)
        with ExitStack() as stack, pytest.raises(RequestError, match=r"not finished after 0\.01 s"):
            async with handling.body(request()):
                await handling.engine({}, stack)
        going.set()
        while not models.names or models.users:
            await asyncio.sleep(0.001)

    asyncio.run(run())
    assert models.is_loaded and not models.users


def test_requests_that_wait_for_a_model_leave_threads_for_others() -> None:
    models, going = Lending(), threading.Event()
    use, models.use = models.use, lambda name: use(name) if going.wait(60) else None  # type: ignore[method-assign]

    async def run() -> int:
        handling = handler(models)
        with ExitStack() as stack:
            waiting = [asyncio.create_task(handling.engine({}, stack)) for _ in range(50)]
            await asyncio.sleep(0.01)
            answer = await asyncio.wait_for(handling.threaded(request(), lambda *_: 7, models.engine, {}), 60)
            going.set()
            await asyncio.gather(*waiting)
        return answer

    assert asyncio.run(run()) == 7


def test_a_model_is_loaded_and_lent_until_the_request_ends() -> None:
    models = Lending()

    async def run(body: dict[str, Json]) -> Engine:
        with ExitStack() as use:
            engine = await handler(models).engine(body, use)
            assert models.users == 1
        return engine

    assert asyncio.run(run({"model": "tiny"})) is models.engine
    assert models.users == 0
    assert asyncio.run(run({})) is models.engine
    assert models.names == ["tiny", None] and models.users == 0
    with pytest.raises(RequestError, match="model must be a text; found 5"):
        asyncio.run(run({"model": 5}))


def submitted(requests: list[EngineRequest], **access: Any) -> Submitting:
    engine = Submitting()

    async def run() -> None:
        handler(**access).submit(request(), cast(Engine, engine), requests)

    asyncio.run(run())
    return engine


@pytest.mark.parametrize(
    ("most", "wish", "limit"), [(None, None, None), (None, 9, 9), (5, None, 5), (5, 9, 5), (5, 3, 3)]
)
def test_an_answer_is_limited(most: int | None, wish: int | None, limit: int | None) -> None:
    (limited,) = submitted([EngineRequest((1,) * 10, wish)], max_tokens=most).requests
    assert (limited.max_tokens, limited.prompt) == (limit, (1,) * 10)


def test_the_limit_leaves_room_for_the_prompt_and_embeddings_alone() -> None:
    requests = [EngineRequest((1,) * 60), EngineRequest((1,) * 64), EngineRequest((1,), pooling="last")]
    limits = [limited.max_tokens for limited in submitted(requests, max_tokens=5).requests]
    assert limits == [4, None, None], "the engine refuses a prompt that fills the context"


def test_events_reach_the_client_the_metrics_and_the_access_log() -> None:
    line, metrics, engine = accesslog.AccessRecord(), Metrics(dict), Submitting()
    sender = request()
    sender.scope[accesslog._SCOPE] = line
    handling = RequestHandling(cast(Models, Lending()), Access(), metrics)

    async def run() -> list[tuple[int, Event]]:
        answers = handling.submit(sender, cast(Engine, engine), [EngineRequest((1, 2, 3))], stream=True)
        engine.sinks[0](Event("a", 1))
        engine.sinks[0](Event("b", 2, "length"))
        return [item async for item in answers.events()]

    assert asyncio.run(run()) == [(0, Event("a", 1)), (0, Event("b", 2, "length"))]
    fields = line.fields()
    assert (fields["model"], fields["stream"]) == ("tiny", True)
    assert (fields["prompt_tokens"], fields["answer_tokens"], fields["finish"]) == (3, 2, ["length"])
    assert b'mlcbuild_requests_total{model="tiny",reason="length"} 1.0' in metrics.text()
