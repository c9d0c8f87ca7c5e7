"""Tests of the events of Anthropic's message streams, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from mlcbuild_format.errors import EngineError, RequestError, ServingError
from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.openai.anthropic_stream import MessageOutput, error_document
from mlcbuild_runtime.openai.call_syntax import CallPiece

from .answers import prompt


def output(*pieces: list[CallPiece]) -> MessageOutput:
    return MessageOutput("tiny", prompt(*pieces))


def kinds(message: MessageOutput, *events: Event) -> list[Any]:
    return [document for event in events for document in message.events(event)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("a", status=400), "invalid_request_error"),
        (RequestError("a", status=404), "not_found_error"),
        (RequestError("a", status=418), "invalid_request_error"),
        (RequestError("a", status=503), "overloaded_error"),
        (RequestError("a", status=599), "api_error"),
        (EngineError("a"), "api_error"),
    ],
)
def test_errors_have_anthropic_s_kinds(error: ServingError, kind: str) -> None:
    assert error_document(error) == {"type": "error", "error": {"type": kind, "message": "a"}}
    assert kinds(output(), Event(error=error)) == [error_document(error)]


def test_a_text_is_one_block() -> None:
    message = output()
    begin: Any = message.begin()
    assert begin["message"]["content"] == [] and begin["message"]["usage"]["input_tokens"] == 5
    shown = kinds(message, Event("a", 1), Event("", 1), Event("b", 2, "length", cached=3))
    assert [each["type"] for each in shown] == [
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        *[each["type"] for each in shown[5:]],
    ]
    assert shown[1]["delta"] == {"type": "text_delta", "text": "a"} and shown[4]["delta"] == {
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }
    assert message.document["content"] == [{"type": "text", "text": "ab"}]
    assert message.document["stop_reason"] == "max_tokens"


def test_thinking_text_and_a_call_are_three_blocks() -> None:
    pieces = [CallPiece("reasoning", "hm"), CallPiece("text", "a"), CallPiece("call", "f")]
    message = output(pieces, [CallPiece("arguments", '{"x"'), CallPiece("arguments", ": 1}")])
    shown = kinds(message, Event("...", 1), Event("...", 2, "stop"))
    starts = [each for each in shown if each["type"] == "content_block_start"]
    assert [(each["index"], each["content_block"]["type"]) for each in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    stops = [each["index"] for each in shown if each["type"] == "content_block_stop"]
    assert stops == [0, 1, 2]
    content: Any = message.document["content"]
    assert content[0] == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert content[2] == {"type": "tool_use", "id": "id1", "name": "f", "input": {"x": 1}}
    assert message.document["stop_reason"] == "tool_use"
