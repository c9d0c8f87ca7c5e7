"""Tests of the lines of Ollama's /api, event by event, without a server."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.request import EngineTimes, Event
from mlcbuild_runtime.openai.call_syntax import CallPiece
from mlcbuild_runtime.openai.ollama_stream import OllamaOutput, moment

from .answers import prompt

TIMES = EngineTimes(0.25, 1.5)


def lines(output: OllamaOutput, *events: Event) -> list[Any]:
    return [document for event in events for document in output.documents(event)]


@pytest.mark.parametrize("kind", ["message", "response"])
def test_a_text_is_lines_and_a_last_one_with_figures(kind: Literal["message", "response"]) -> None:
    output = OllamaOutput("tiny", prompt(), kind)
    events = Event("He", 1), Event("y", 2, "length", times=TIMES)
    shown = lines(output, *events)
    texts = [line["message"]["content"] if kind == "message" else line["response"] for line in shown]
    assert texts == ["He", "y", ""] and [line["done"] for line in shown] == [False, False, True]
    assert shown[-1]["done_reason"] == "length" and shown[-1]["model"] == "tiny"
    assert (shown[-1]["prompt_eval_count"], shown[-1]["eval_count"]) == (5, 2)
    assert (shown[-1]["prompt_eval_duration"], shown[-1]["eval_duration"]) == (250_000_000, 1_500_000_000)
    whole: Any = OllamaOutput("tiny", prompt(), kind).whole(events)
    assert (whole["message"]["content"] if kind == "message" else whole["response"]) == "Hey"
    assert whole["done"] is True and whole["eval_count"] == 2


def test_calls_come_when_their_arguments_are_whole() -> None:
    pieces = (
        [CallPiece("reasoning", "hm"), CallPiece("call", "f"), CallPiece("arguments", '{"a"')],
        [CallPiece("arguments", ": 1}"), CallPiece("call", "g"), CallPiece("arguments", '{"cut')],
    )
    events = Event("x", 1), Event("x", 2, "stop")
    shown = lines(OllamaOutput("tiny", prompt(*pieces), "message"), *events)
    assert shown[0]["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    calls = [call for line in shown for call in line["message"].get("tool_calls", ())]
    assert [(call["id"], call["function"]) for call in calls] == [
        ("id1", {"name": "f", "arguments": {"a": 1}}),
        ("id1", {"name": "g", "arguments": {}}),
    ]
    whole: Any = OllamaOutput("tiny", prompt(*pieces), "message").whole(events)
    assert whole["message"]["tool_calls"] == calls and whole["message"]["thinking"] == "hm"
    assert whole["done_reason"] == "stop" and whole["eval_duration"] == 0, "no times are known"


def test_an_error_is_one_line() -> None:
    assert lines(OllamaOutput("tiny", prompt(), "message"), Event(error=EngineError("x"))) == [{"error": "x"}]


def test_times_are_those_of_rfc_3339() -> None:
    assert moment(0) == "1970-01-01T00:00:00+00:00"
    assert datetime.fromisoformat(moment()).tzinfo is not None
