"""Tests of the metrics of answers and engines, without a server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import fields

import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.request import Event, State
from mlcbuild_runtime.http.metrics import Metrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Parses metrics in Prometheus' text format. Returns (name, values of all labels except `le`) -> value,
    for samples that are not histogram buckets.
    """
    return {
        (sample.name, *(text for label, text in sample.labels.items() if label != "le")): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_times_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 11.0, 12.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    metrics, events = Metrics(dict), list[Event]()
    take = metrics.watched("a", events.append)
    sent = [Event("x", 1), Event("y", 2), Event("z", 5, "length")]
    for event in sent:
        take(event)
    assert events == sent
    actual = values(metrics)
    assert actual["mlcbuild_first_token_seconds_sum", "a"] == 0.5
    assert actual["mlcbuild_first_token_seconds_count", "a"] == 1
    assert actual["mlcbuild_token_seconds_sum", "a"] == pytest.approx(2.0 / 4)
    assert actual["mlcbuild_request_seconds_sum", "a"] == 2.5
    assert actual["mlcbuild_requests_total", "a", "length"] == 1


def test_an_answer_that_fails_has_no_first_token() -> None:
    metrics = Metrics(dict)
    metrics.watched("a", lambda event: None)(Event(error=EngineError("broken")))
    actual = values(metrics)
    assert actual["mlcbuild_requests_total", "a", "error"] == 1
    assert ("mlcbuild_first_token_seconds_count", "a") not in actual
    assert ("mlcbuild_token_seconds_count", "a") not in actual


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    metrics = Metrics(dict)
    metrics.watched("a", lambda event: None)(Event("x", 1, "stop"))
    assert ("mlcbuild_token_seconds_count", "a") not in values(metrics)


def test_the_load_of_each_engine_and_its_sums() -> None:
    numbers = {item.name: place for place, item in enumerate(fields(State), 1) if item.name != "alive"}
    metrics = Metrics(lambda: {"a": State(**numbers, alive=True)})
    actual = values(metrics)
    assert actual["mlcbuild_requests_running", "a"] == numbers["running"]
    assert actual["mlcbuild_requests_waiting", "a"] == numbers["waiting"]
    assert actual["mlcbuild_kv_pages_free", "a"] == numbers["free_pages"]
    assert actual["mlcbuild_kv_pages_cached", "a"] == numbers["cached_pages"]
    assert actual["mlcbuild_kv_pages", "a"] == numbers["pages"]
    assert actual["mlcbuild_prompt_tokens_total", "a"] == numbers["prompt_tokens"]
    assert actual["mlcbuild_prompt_tokens_cached_total", "a"] == numbers["cached_tokens"]
    assert actual["mlcbuild_answer_tokens_total", "a"] == numbers["answer_tokens"]
    assert actual["mlcbuild_decode_steps_total", "a"] == numbers["decode_steps"]
    assert actual["mlcbuild_draft_tokens_total", "a"] == numbers["drafted_tokens"]
    assert actual["mlcbuild_draft_tokens_accepted_total", "a"] == numbers["accepted_tokens"]
    assert actual["mlcbuild_preemptions_total", "a"] == numbers["preemptions"]


def test_errors_are_counted_by_status() -> None:
    metrics, statuses, sent = Metrics(dict), [400, 200, 400, 399, 503], list[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": statuses[len(sent) // 2]})
        await send({"type": "http.response.body"})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def talk() -> None:
        for _ in statuses:
            await metrics.counted(app)({"type": "http"}, receive, send)

    asyncio.run(talk())
    actual = values(metrics)
    assert [message["status"] for message in sent[::2]] == statuses
    assert [name for name in actual if name[0] == "mlcbuild_errors_total"] == [
        ("mlcbuild_errors_total", "400"),
        ("mlcbuild_errors_total", "503"),
    ]
    assert (actual["mlcbuild_errors_total", "400"], actual["mlcbuild_errors_total", "503"]) == (2, 1)
