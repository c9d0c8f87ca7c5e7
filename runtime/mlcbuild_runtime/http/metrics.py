"""Keeps the Prometheus metrics of one server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlcbuild_runtime.engine.request import Event, Sink, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_GAUGES = {
    "running": ("requests_running", "Requests that run."),
    "waiting": ("requests_waiting", "Requests that wait to be admitted to a batch."),
    "pages": ("kv_pages", "Pages of the KV cache."),
    "free_pages": (
        "kv_pages_free",
        "Pages that can be allocated, including those that only the prefix cache uses.",
    ),
    "cached_pages": ("kv_pages_cached", "Pages of the prefix cache, in use or not."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens prefilled."),
    "cached_tokens": (
        "prompt_tokens_cached",
        "Prompt tokens that were read from the prefix cache instead of computed.",
    ),
    "answer_tokens": ("answer_tokens", "Tokens made."),
    "decode_steps": (
        "decode_steps",
        "Decode steps; answer tokens divided by decode steps is the average batch size.",
    ),
    "drafted_tokens": ("draft_tokens", "Tokens drafted by speculative decoding."),
    "accepted_tokens": ("draft_tokens_accepted", "Drafted tokens that became part of answers."),
    "preemptions": (
        "preemptions",
        "Preemptions: times that a running request lost its pages and had to wait again.",
    ),
}


class Metrics:
    """The Prometheus metrics of a server: for each model the latencies and counts of answers and the state of
    the engine, and the counts of HTTP answers with a status of 400 or above."""

    def __init__(self, states: Callable[[], Mapping[str, State]]) -> None:
        self._registry = CollectorRegistry()
        self._first = self._seconds("first_token", "Seconds until the first token of an answer.", _SECONDS)
        self._each = self._seconds(
            "token", "Seconds for each token of an answer after the first.", _TOKEN_SECONDS
        )
        self._whole = self._seconds("request", "Seconds until the last token of an answer.", _SECONDS)
        self._ended = Counter(
            "mlcbuild_requests",
            "Answers that have ended, by finish reason.",
            ["model", "reason"],
            registry=self._registry,
        )
        self._errors = Counter(
            "mlcbuild_errors",
            "Answers with a status of 400 or above, except to requests that are not valid HTTP.",
            ["status"],
            registry=self._registry,
        )
        self._registry.register(_EngineState(states))

    def _seconds(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"mlcbuild_{name}_seconds", text, ["model"], buckets=buckets, registry=self._registry
        )

    def watched(self, model: str, sink: Sink) -> Sink:
        """Returns a function for the events of one answer, which passes each event to `sink`. It records in
        the metrics of `model` the finish reason, and in seconds the times from this call to the first token
        and to the end, and the mean time of each further token."""
        start, first = time.perf_counter(), 0.0

        def take(event: Event) -> None:
            nonlocal first
            now = time.perf_counter()
            if event.error is None and not first:
                first = now
                self._first.labels(model).observe(now - start)
            if event.last:
                self._ended.labels(model, event.finish or "error").inc()
                self._whole.labels(model).observe(now - start)
                if first and event.tokens > 1:
                    self._each.labels(model).observe((now - first) / (event.tokens - 1))
            sink(event)

        return take

    def counted(self, app: ASGIApp) -> ASGIApp:
        """Returns an ASGI application that sends the answers of `app`, and counts those with a status of 400
        or above in the metrics."""

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            async def answer(message: Message) -> None:
                if message["type"] == "http.response.start" and message["status"] >= 400:
                    self._errors.labels(str(message["status"])).inc()
                await send(message)

            await app(scope, receive, answer)

        return count

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format, encoded in UTF-8, with the engines' state at this
        call."""
        return generate_latest(self._registry)


class _EngineState(Collector):
    def __init__(self, states: Callable[[], Mapping[str, State]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        states = self._states()
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, (name, text) in table.items():
                family = kind(f"mlcbuild_{name}", text, labels=["model"])
                for model, state in states.items():
                    family.add_metric([model], getattr(state, field))
                yield family
