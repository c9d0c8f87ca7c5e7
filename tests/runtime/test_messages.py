"""Tests of checking the messages of a chat and simplifying them for chat templates."""

from __future__ import annotations

from typing import Any

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.openai.messages import content_text, messages


class Body:
    """A request body with the field `messages` only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self, key: str) -> Any:
        assert key == "messages"
        return self.value


def simple(*listed: Any) -> tuple[Any, ...]:
    return messages(Body(list(listed)))  # type: ignore[arg-type]


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}


def test_messages_are_roles_and_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert simple({"role": "developer", "content": parts}, {"role": "user", "content": "c", "name": "n"}) == (
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c"},
    )


def test_calls_and_results_go_back_to_the_template() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    plain, result = simple(called, {"role": "tool", "content": "7", "tool_call_id": "c1"})
    assert plain["content"] == "" and plain["reasoning_content"] == "hm"
    assert plain["tool_calls"] == [{**CALL, "function": {"name": "f", "arguments": {"a": [1]}}}]
    assert result == {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"}
    empty = {**CALL, "function": {"name": "f", "arguments": ""}}
    (plain,) = simple({**called, "tool_calls": [empty]})
    assert plain["tool_calls"][0]["function"]["arguments"] == {}


def test_fields_that_say_nothing_are_accepted() -> None:
    assert simple({"role": "user", "content": "a", "audio": None, "tool_calls": []}) == (
        {"role": "user", "content": "a"},
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("hi", r"messages\[0\]"),
        ({"role": "bot", "content": "a"}, r"messages\[0\].role"),
        ({"role": "user"}, r"messages\[0\].content"),
        ({"role": "user", "content": 1}, r"messages\[0\].content"),
        ({"role": "user", "content": "\ud800"}, r"messages\[0\].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\].content\[0\]"),
        ({"role": "user", "content": "a", "tool_call_id": "x"}, r"messages\[0\].tool_call_id .*leave it out"),
        ({"role": "user", "content": "a", "weight": 1}, r"messages\[0\].weight .*leave it out"),
        ({"role": "tool", "content": "a", "tool_call_id": 1}, r"messages\[0\].tool_call_id"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, r"messages\[0\].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, r"messages\[0\].tool_calls\[0\]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}, r"messages\[0\].tool_calls\[0\]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"messages\[0\].tool_calls\[0\].function.arguments",
        ),
    ],
)
def test_what_is_refused_is_named(message: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        simple(message)


@pytest.mark.parametrize("value", [None, [], "a", {"role": "user"}])
def test_a_chat_has_messages(value: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        messages(Body(value))  # type: ignore[arg-type]


def test_a_text_may_come_in_parts() -> None:
    assert content_text("x", [{"type": "text", "text": "a"}]) == "a" and content_text("x", []) == ""
