"""Answers of Ollama's /api: converts the engine's events to the lines of a stream, and to one document."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal

from mlcbuild_format.errors import ServingError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.openai.call_syntax import CallPiece
from mlcbuild_runtime.openai.chat_documents import Prompt

Document = dict[str, Json]
_SECOND = 1_000_000_000
"""Number of nanoseconds in a second: Ollama's API states durations in nanoseconds."""


def error_document(error: ServingError) -> Document:
    """Returns an error as the JSON document of Ollama's API."""
    return {"error": str(error)}


def moment(seconds: float | None = None) -> str:
    """Returns a time as text in Ollama's format, RFC 3339 in UTC. seconds: since 1970; None: the current
    time.
    """
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat()


class OllamaOutput:
    """One answer of Ollama's API while it is generated. kind: "message" if its pieces are chat messages
    (/api/chat), "response" if they are plain texts (/api/generate)."""

    def __init__(self, model: str, prompt: Prompt, kind: Literal["message", "response"]) -> None:
        self._model, self._kind, self._size = model, kind, prompt.size
        self._reader = prompt.reader() if prompt.reader is not None else None
        self._calls: list[Document] = []
        self._name = self._arguments = self._id = ""
        """The name, the JSON text of the arguments so far, and the id of the tool call whose text is
        arriving; name and arguments are "" while there is none."""
        self._began = time.monotonic()

    def documents(self, event: Event) -> Iterator[Document]:
        """Yields the JSON documents of Ollama's stream that one event of the engine (a token, or the end)
        causes. A tool call is one document, when the next call begins or the answer ends; an error becomes an
        error document."""
        if event.error is not None:
            yield error_document(event.error)
            return
        pieces = [CallPiece("text", event.text)] if event.text else []
        for piece in self._reader.read(event.text, event.last) if self._reader else pieces:
            if piece.kind == "call":
                yield from self._called()
                assert self._reader is not None
                self._name, self._id = piece.text, self._reader.call_id()
            elif piece.kind == "arguments":
                self._arguments += piece.text
            elif piece.text:
                yield self._piece(**{"content" if piece.kind == "text" else "thinking": piece.text})
        if event.last:
            yield from self._called()
            yield self._piece() | self._end(event)

    def whole(self, events: Sequence[Event]) -> Document:
        """Returns Ollama's JSON document of a complete answer. events: all events of the answer, at least
        one, and none of them an error."""
        content, thinking, calls, last = "", "", list[Json](), Document()
        for document in (document for event in events for document in self.documents(event)):
            part = document.get("message") if self._kind == "message" else document
            assert isinstance(part, dict)
            content += str(part.get("content" if self._kind == "message" else "response") or "")
            thinking += str(part.get("thinking") or "")
            more = part.get("tool_calls")
            calls += more if isinstance(more, list) else []
            last = document
        remaining: dict[str, Json] = {
            "content": content,
            "thinking": thinking or None,
            "tool_calls": calls or None,
        }
        return last | self._piece(**remaining) | {"done": True}

    def _piece(self, content: Json = "", thinking: Json = None, tool_calls: Json = None) -> Document:
        shared: Document = {"model": self._model, "created_at": moment()}
        more: Document = {} if thinking is None else {"thinking": thinking}
        if self._kind == "response":
            return {**shared, "response": content, **more, "done": False}
        more |= {} if tool_calls is None else {"tool_calls": tool_calls}
        return {**shared, "message": {"role": "assistant", "content": content, **more}, "done": False}

    def _called(self) -> Iterator[Document]:
        """Yields the chunk of Ollama's stream, a JSON document, with the tool call that was being read, if
        there is one. Its arguments are {} if the limit of tokens has cut them off."""
        if self._name:
            try:
                arguments: Json = json.loads(self._arguments)
            except ValueError:  # The limit of tokens has cut the call off.
                arguments = {}
            function: Json = {"name": self._name, "arguments": arguments}
            self._name = self._arguments = ""
            yield self._piece(tool_calls=[{"id": self._id, "function": function}])

    def _end(self, event: Event) -> Document:
        times = event.times
        return {
            "done": True,
            "done_reason": "length" if event.finish == "length" else "stop",
            "total_duration": round((time.monotonic() - self._began) * _SECOND),
            "load_duration": 0,
            "prompt_eval_count": self._size,
            "prompt_eval_duration": round(times.prompt * _SECOND) if times else 0,
            "eval_count": event.tokens,
            "eval_duration": round(times.answer * _SECOND) if times else 0,
        }
