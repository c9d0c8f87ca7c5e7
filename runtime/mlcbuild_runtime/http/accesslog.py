"""Writes the access log: a line for each request when its answer has ended, either text for a terminal or a
JSON object with these fields.

    time            arrival of the request, UTC, ISO 8601
    id              the request's X-Request-ID, or a new one without a valid one; the answer carries it, too
    client          the client's address
    method, path, status, seconds
                    `status` is null where the client disconnected before the answer began; `seconds` is the
                    time until the answer ended
    model, stream, prompt_tokens, cached_tokens, answer_tokens, finish, ttft
                    only for requests to a model; `prompt_tokens` and `cached_tokens` are the sums
                    over all prompts, of which each counts once, with the smallest number of cached tokens of
                    its answers; `answer_tokens` is the sum over all answers; `finish` lists the reason of
                    each answer, "error" for a failure and null where the client disconnected first; `ttft`
                    is the seconds until the first token of any answer, and absent without one

No line contains text of a prompt or an answer, a query string, or a key.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, TextIO

from mlcbuild_format.fields import printable
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlcbuild_runtime.engine.request import Event, Request, Sink
from mlcbuild_runtime.http.logs import json_line

log = logging.getLogger(__name__)

_SCOPE = "mlcbuild.access"
_ID = re.compile(r"[!-~]{1,128}")


class AccessRecord:
    """Collects the fields of a request's line in the access log that describe the model's work: model,
    tokens, finish reasons and times."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._model: str | None = None
        self._prompt_tokens, self._stream = 0, False
        self._prompts, self._prompt_of = 0, list[int]()
        """_prompts is the number of different prompts, _prompt_of the number (1, 2, ...) of each answer's."""
        self._answers: list[Event | None] = []
        self._first: float | None = None

    def model(self, name: str, requests: Sequence[Request], stream: bool) -> None:
        """Stores the name of the model for the log line, and adds up the tokens of the prompts. requests: one
        for each answer; of several answers to one prompt, only the first (`sampling.choice` 0) counts.
        stream: True if the answer is streamed."""
        self._model, self._stream = name, stream
        for request in requests:
            if request.sampling.choice == 0:
                self._prompt_tokens += len(request.prompt)
                self._prompts += 1
            self._prompt_of.append(self._prompts)

    def watched(self, sink: Sink) -> Sink:
        """Returns a function for the events of one answer: it stores the time of the first token of any of
        the request's answers, and the latest event of this one, for the log line, and passes each event to
        `sink`."""
        place = len(self._answers)
        self._answers.append(None)

        def take(event: Event) -> None:
            if self._first is None and event.error is None:
                self._first = time.perf_counter()
            self._answers[place] = event
            sink(event)

        return take

    def fields(self) -> dict[str, object]:
        described: dict[str, object] = {"seconds": round(time.perf_counter() - self._start, 6)}
        if self._model is None:
            return described
        received = [event for event in self._answers if event is not None]
        described |= {
            "model": self._model,
            "stream": self._stream,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens(),
            "answer_tokens": sum(event.tokens for event in received),
            "finish": [_finish(event) for event in self._answers],
        }
        if self._first is not None:
            described["ttft"] = round(self._first - self._start, 6)
        return described

    def _cached_tokens(self) -> int:
        """Returns the number of prompt tokens that were read from the prefix cache, as `usage` of a response
        states it: the sum over all prompts of the smallest number of an answer. Answers without an event are
        left out."""
        cached = dict[int, int]()
        for prompt, event in zip(self._prompt_of, self._answers, strict=False):
            if event is not None:
                cached[prompt] = min(event.cached, cached.get(prompt, event.cached))
        return sum(cached.values())


def _finish(event: Event | None) -> str | None:
    if event is None:
        return None
    return "error" if event.error is not None else event.finish


def record(scope: Scope) -> AccessRecord:
    """Returns the record to which an HTTP request's fields of the access log are added; without an access
    log, a record that is never written."""
    record_of_request = scope.get(_SCOPE)
    return record_of_request if isinstance(record_of_request, AccessRecord) else AccessRecord()


Form = Literal["json", "text"]
"""The form of lines in the access log: JSON for programs, or text for people."""
_QUIET = ("/health", "/ping", "/metrics")
"""Beginnings of the paths that are not logged in text form, because monitors request them all the time."""


def _text(fields: Mapping[str, object]) -> str:
    """Returns a request's log line for a terminal; "" for a path that monitors request all the time, such as
    /health."""
    path = str(fields["path"])
    if path.startswith(_QUIET):
        return ""
    came = datetime.fromisoformat(str(fields["time"])).astimezone()
    status = "left" if fields["status"] is None else fields["status"]
    line = f"{came:%H:%M:%S} {status} {fields['method']} {path} in {fields['seconds']:.2f} s"
    if "model" in fields:
        cached = f" ({fields['cached_tokens']} cached)" if fields["cached_tokens"] else ""
        line += f", {fields['model']}: {fields['prompt_tokens']}{cached} + {fields['answer_tokens']} tokens"
    return printable(line)


class AccessLog:
    """ASGI middleware that writes a line of the access log when the answer to a request has ended, and adds
    the request's id to the answer as X-Request-ID. In the form "text", requests of monitors have no line. An
    id of the client that is not 1 to 128 visible ASCII characters is replaced. If lines cannot be written,
    they are lost, and one warning is logged until writing succeeds again."""

    def __init__(self, app: ASGIApp, out: TextIO, form: Form = "json") -> None:
        self._app, self._out, self._broken = app, out, False
        self._line = json_line if form == "json" else _text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        requested_id = Headers(scope=scope).get("x-request-id", "")
        id, came = requested_id if _ID.fullmatch(requested_id) else uuid.uuid4().hex, datetime.now(UTC)
        entry, status = AccessRecord(), 0
        scope[_SCOPE] = entry

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            client = scope.get("client")
            self._write(
                {
                    "time": came.isoformat(timespec="milliseconds"),
                    "id": id,
                    "client": client[0] if client else None,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status or None,
                    **entry.fields(),
                }
            )

    def _write(self, fields: dict[str, object]) -> None:
        try:
            if line := self._line(fields):
                self._out.write(line + "\n")
                self._out.flush()
            self._broken = False
        except (OSError, ValueError) as error:
            if not self._broken:
                log.warning("the access log cannot be written: %s", error)
            self._broken = True
