"""Converts the engine's events, one for each token, to a response of /v1/responses: its items (messages,
reasoning, tool calls) and the events of its stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.openai.call_syntax import CallPiece
from mlcbuild_runtime.openai.chat_documents import Prompt, error_document

Document = dict[str, Json]
CANCELLED = "cancelled"
"""The code of the RequestError that ends a response's events when the client cancels the response. The
response itself then has the status "cancelled" and no error."""


class ResponseOutput:
    """One response of /v1/responses while it is generated. Its method `events` converts the engine's events
    to those of a stream; its attribute `document` is the response as JSON, without output and usage until the
    last event."""

    def __init__(self, model: str, prompt: Prompt, shown: Mapping[str, Json]) -> None:
        """Begins a response of /v1/responses. model: the model's name in the response; prompt: the length of
        the prompt, for the response's usage, and the parser that splits the answer into reasoning, text and
        tool calls; shown: the fields of the request that the response repeats, name -> value."""
        self.items: list[Document] = []
        self._prompt, self._reader = prompt, prompt.reader() if prompt.reader is not None else None
        self._open: Document | None = None
        self._sequence = self._tokens = self._reasoning_tokens = 0
        self.document: Document = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **shown,
        }

    @property
    def id(self) -> str:
        return str(self.document["id"])

    def begin(self) -> Iterator[Document]:
        """Yields the events of the stream of /v1/responses that come before the first item of a response."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=dict(self.document))

    def events(self, event: Event) -> Iterator[Document]:
        """Yields the events of the stream of /v1/responses that one event of the engine (a token, or the end)
        causes. The last event of all is `response.completed`, `response.incomplete` or, after an error or a
        cancellation, `response.failed`."""
        self._tokens = max(self._tokens, event.tokens)
        if event.text or event.last:
            pieces = [CallPiece("text", event.text)] if event.text else []
            for piece in self._reader.read(event.text, event.last) if self._reader else pieces:
                yield from self._piece(piece)
            if self._reader is not None and self._reader.is_thinking:
                self._reasoning_tokens = self._tokens
        if event.last:
            yield from self._end(event)

    def _piece(self, piece: CallPiece) -> Iterator[Document]:
        if piece.kind in ("text", "reasoning") and piece.text:
            item, delta = (
                ("message", "output_text") if piece.kind == "text" else ("reasoning", "reasoning_text")
            )
            if self._open is None or self._open["type"] != item:
                yield from self._close("completed")
                yield from self._begin_text(item)
            yield from self._delta(delta, piece.text)
        elif piece.kind == "call" and self._reader is not None:
            yield from self._close("completed")
            call: Document = {
                "id": f"fc_{uuid.uuid4().hex}",
                "type": "function_call",
                "call_id": self._reader.call_id(),
            }
            yield self._begin_item(call | {"name": piece.text, "arguments": "", "status": "in_progress"})
        elif piece.kind == "arguments":
            yield from self._delta("function_call_arguments", piece.text)

    def _begin_item(self, item: Document) -> Document:
        self._open = item
        self.items.append(item)
        return self._event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))

    def _begin_text(self, kind: str) -> Iterator[Document]:
        """Yields the stream events that begin an item of a response: a message, or reasoning. kind: "message"
        or "reasoning"."""
        item: Document = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": []}
        if kind == "message":
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        yield self._begin_item(item | {"status": "in_progress", "content": []})
        assert self._open is not None
        part = _part(self._open, "")
        yield self._about_item("response.content_part.added", content_index=0, part=part)
        self._open["content"] = [part]

    def _delta(self, kind: str, text: str) -> Iterator[Document]:
        assert self._open is not None
        if kind in ("output_text", "reasoning_text"):
            self._open["content"] = [_part(self._open, _text(self._open) + text)]
            more: Document = {"content_index": 0}
            if kind == "output_text":
                more["logprobs"] = []
        else:
            self._open["arguments"] = f"{self._open['arguments']}{text}"
            more = {}
        yield self._about_item(f"response.{kind}.delta", delta=text, **more)

    def _close(self, status: str) -> Iterator[Document]:
        """Yields the stream events that end the item of the response that is being generated, if there is
        one. status: "completed" or "incomplete", the item's status."""
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] in ("message", "reasoning"):
            text, at = _text(item), {"content_index": 0}
            if item["type"] == "message":
                yield self._about_item("response.output_text.done", text=text, logprobs=[], **at)
            else:
                yield self._about_item("response.reasoning_text.done", text=text, **at)
            yield self._about_item("response.content_part.done", part=_part(item, text), **at)
        else:
            arguments, name = item["arguments"], item["name"]
            yield self._about_item("response.function_call_arguments.done", arguments=arguments, name=name)
        index = len(self.items) - 1
        yield self._event("response.output_item.done", output_index=index, item=dict(item))
        self._open = None

    def _end(self, event: Event) -> Iterator[Document]:
        error, status = event.error, "completed"
        if error is not None:
            cancelled = isinstance(error, RequestError) and error.code == CANCELLED
            status = "cancelled" if cancelled else "failed"
            self.document["error"] = None if cancelled else _error(event)
        elif event.finish == "length":
            status = "incomplete"
            self.document["incomplete_details"] = {"reason": "max_output_tokens"}
        yield from self._close("completed" if status == "completed" else "incomplete")
        size = self._prompt.size
        self.document["usage"] = {
            "input_tokens": size,
            "input_tokens_details": {"cached_tokens": event.cached, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": size + self._tokens,
        }
        self.document |= {"status": status, "output": list(self.items), "completed_at": int(time.time())}
        name = "failed" if status == "cancelled" else status
        yield self._event(f"response.{name}", response=dict(self.document))

    def _about_item(self, kind: str, **fields: Json) -> Document:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self.items) - 1, **fields)

    def _event(self, kind: str, **fields: Json) -> Document:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}


def _part(item: Document, text: str) -> Document:
    """Returns a text as a content part of OpenAI's API, a JSON object of the type `reasoning_text` if `item`
    is a reasoning item, or `output_text` if it is a message."""
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text(message: Document) -> str:
    match message:
        case {"content": [{"text": str(text)}]}:
            return text
    return ""


def _error(event: Event) -> Json:
    assert event.error is not None
    error = error_document(event.error)["error"]
    assert isinstance(error, dict)
    return {"code": error["code"] or "server_error", "message": error["message"]}
