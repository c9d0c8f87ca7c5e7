"""Tests of the items and events of /v1/responses, event by event, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from mlcbuild_format.errors import EngineError, RequestError, ServingError
from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.openai.call_syntax import CallPiece
from mlcbuild_runtime.openai.responses_stream import CANCELLED, ResponseOutput

from .answers import prompt


def run(output: ResponseOutput, *events: Event) -> list[Any]:
    return [*output.begin(), *(document for event in events for document in output.events(event))]


def kinds(documents: list[Any]) -> list[str]:
    return [document["type"].removeprefix("response.") for document in documents]


def test_a_text_is_one_message_and_events_are_numbered() -> None:
    output = ResponseOutput("tiny", prompt(), {"metadata": {"a": "b"}})
    shown = run(output, Event("He", 1), Event("", 2), Event("y", 3, "stop", cached=4))
    assert kinds(shown) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [document["sequence_number"] for document in shown] == list(range(len(shown)))
    last = shown[-1]["response"]
    (item,) = last["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hey", "annotations": [], "logprobs": []}]
    assert (item["status"], last["status"], last["metadata"]) == ("completed", "completed", {"a": "b"})
    usage = last["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 3, 8)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert shown[0]["response"]["status"] == "in_progress" and shown[0]["response"]["output"] == []


def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    first = [CallPiece("reasoning", "hm"), CallPiece("reasoning", "!"), CallPiece("text", "a")]
    calls = [CallPiece("call", "f"), CallPiece("arguments", "{}"), CallPiece("call", "g")]
    output = ResponseOutput("tiny", prompt(first, calls, [CallPiece("arguments", "[]")]), {})
    shown = run(output, Event("x", 1), Event("x", 2), Event("x", 3, "stop"))
    items: Any = output.document["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hm!"}]
    assert [(item["name"], item["arguments"], item["call_id"]) for item in items[2:]] == [
        ("f", "{}", "id1"),
        ("g", "[]", "id1"),
    ]
    added = [each["output_index"] for each in shown if each["type"] == "response.output_item.added"]
    ended = [each["output_index"] for each in shown if each["type"] == "response.output_item.done"]
    assert added == ended == [0, 1, 2, 3]
    for each in shown:
        if "item_id" in each:
            assert each["item_id"] == items[each["output_index"]]["id"]


def test_tokens_while_the_model_thinks_are_counted() -> None:
    thinking = prompt([CallPiece("reasoning", "a")], [CallPiece("text", "b")], is_thinking=True)
    output = ResponseOutput("tiny", thinking, {})
    run(output, Event("x", 7), Event("x", 9, "stop"))
    usage: Any = output.document["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 9
    plain = ResponseOutput("tiny", prompt([CallPiece("text", "b")]), {})
    run(plain, Event("x", 9, "stop"))
    usage = plain.document["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(
    ("event", "status", "last", "error"),
    [
        (Event("", 1, "length"), "incomplete", "incomplete", None),
        (Event(error=RequestError("x", code=CANCELLED)), "cancelled", "failed", None),
        (Event(error=RequestError("x", code="late")), "failed", "failed", {"code": "late", "message": "x"}),
        (Event(error=EngineError("x")), "failed", "failed", {"code": "server_error", "message": "x"}),
    ],
)
def test_every_end_has_its_status(event: Event, status: str, last: str, error: Any) -> None:
    output = ResponseOutput("tiny", prompt(), {})
    shown = run(output, Event("a", 1), event)
    assert kinds(shown)[-2:] == ["output_item.done", last]
    items: Any = output.document["output"]
    assert (output.document["status"], output.document["error"]) == (status, error)
    assert items[0]["status"] == "incomplete" and output.id.startswith("resp_")
    details = {"reason": "max_output_tokens"} if event.finish == "length" else None
    assert output.document["incomplete_details"] == details


def test_an_error_without_a_token_leaves_no_item() -> None:
    error: ServingError = EngineError("x")
    output = ResponseOutput("tiny", prompt(), {})
    assert kinds(run(output, Event(error=error)))[-1] == "failed" and output.document["output"] == []
