"""Answers of Anthropic's endpoint /v1/messages: converts the engine's events to content blocks of one
message, and to the events of a stream.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

from mlcbuild_format.errors import RequestError, ServingError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.openai.call_syntax import CallPiece
from mlcbuild_runtime.openai.chat_documents import Prompt

Document = dict[str, Json]
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status -> type of the error in Anthropic's API. Others are "api_error" from 500 on, else
"invalid_request_error"."""
_DELTAS = {
    "text": ("text", "text_delta", "text"),
    "reasoning": ("thinking", "thinking_delta", "thinking"),
    "arguments": ("tool_use", "input_json_delta", "partial_json"),
}
"""Kind of text in an answer ("text", "reasoning" or "arguments" of a tool call) -> (type of its content
block, type of its delta, field of the delta with the text) in Anthropic's stream.
"""


def error_document(error: ServingError) -> Document:
    """Returns an error as the JSON document of Anthropic's API; its type follows from the HTTP status, which
    is 500 unless the error is a RequestError."""
    status = error.status if isinstance(error, RequestError) else 500
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


class MessageOutput:
    """One answer of Anthropic's endpoint /v1/messages while it is generated. Its method `events` converts the
    engine's events to those of a stream; its attribute `document` is the whole message as JSON, without
    content until the last event."""

    def __init__(self, model: str, prompt: Prompt) -> None:
        self._reader = prompt.reader() if prompt.reader is not None else None
        self._size, self._blocks = prompt.size, list[Document]()
        self._arguments = ""
        self.document: Document = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(prompt.size, 0, 0),
        }

    def begin(self) -> Document:
        """Returns the event `message_start` of Anthropic's stream, with which a streamed message begins,
        before its first content block."""
        return {"type": "message_start", "message": dict(self.document)}

    def events(self, event: Event) -> Iterator[Document]:
        """Yields the events of Anthropic's stream that one event of the engine (a token, or the end) causes.
        An error of the engine becomes the event `error`."""
        if event.error is not None:
            yield error_document(event.error)
            return
        if event.text or event.last:
            pieces = [CallPiece("text", event.text)] if event.text else []
            for piece in self._reader.read(event.text, event.last) if self._reader else pieces:
                yield from self._piece(piece)
        if event.last:
            yield from self._end(event)

    def _piece(self, piece: CallPiece) -> Iterator[Document]:
        if piece.kind == "call":
            assert self._reader is not None
            yield from self._open(
                {"type": "tool_use", "id": self._reader.call_id(), "name": piece.text, "input": {}}
            )
            return
        kind, delta, field = _DELTAS[piece.kind]
        if piece.kind != "arguments" and (not self._blocks or self._blocks[-1]["type"] != kind):
            yield from self._open(
                {"type": kind, field: "", **({"signature": ""} if kind == "thinking" else {})}
            )
        if piece.kind == "arguments":
            self._arguments += piece.text
        else:
            self._blocks[-1][field] = f"{self._blocks[-1][field]}{piece.text}"
        shown: Document = {"type": delta, field: piece.text}
        yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": shown}

    def _open(self, block: Document) -> Iterator[Document]:
        yield from self._close()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Document]:
        """Yields the stream event that ends the last content block of a message, once for each block; nothing
        if there is no block yet. The collected arguments of a tool call are decoded before, and stored in its
        block as `input`."""
        if not self._blocks:
            return
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"], self._arguments = _arguments(self._arguments), ""
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _end(self, event: Event) -> Iterator[Document]:
        yield from self._close()
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        reason = "max_tokens" if event.finish == "length" else "tool_use" if has_calls else "end_turn"
        usage = _usage(self._size, event.cached, event.tokens)
        self.document |= {"content": list(self._blocks), "stop_reason": reason, "usage": usage}
        delta: Document = {"stop_reason": reason, "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}


def _arguments(text: str) -> Json:
    """Returns the arguments of a tool call, decoded from JSON; {} if the text is not valid JSON, because the
    limit of tokens has cut the call off."""
    try:
        value: Json = json.loads(text)
    except ValueError:
        return {}
    return value


def _usage(prompt: int, cached: int, answer: int) -> Document:
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer,
    }
