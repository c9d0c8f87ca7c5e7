"""Tests of OpenAI's response documents, whole and in chunks, without a server."""

from __future__ import annotations

from typing import Any, cast

import pytest
from mlcbuild_format.errors import EngineError, RequestError, ServingError
from mlcbuild_runtime.engine.request import EngineTimes, Event
from mlcbuild_runtime.executor.sampling_params import Logprob
from mlcbuild_runtime.openai.call_syntax import CallPiece
from mlcbuild_runtime.openai.chat_documents import Prompt, Reply, error_document
from mlcbuild_runtime.text.vocabulary import Vocabulary

from .answers import prompt


class Letters:
    """A vocabulary of letters; token 8 is half of a character, and token 9 is special."""

    def token_bytes(self, token: int) -> bytes:
        return {8: b"\xc3", 9: b""}.get(token, bytes([ord("a") + token]))

    def token_name(self, token: int) -> str:
        return {8: "<0xC3>", 9: "</s>"}.get(token, "?")


def reply(*prompts: Prompt, chat: bool = True) -> Reply:
    return Reply(chat, "tiny", cast(Vocabulary, Letters()), prompts)


def chunks(actual: Reply, *events: Event, index: int = 0, usage: bool = False) -> list[Any]:
    return [chunk for event in events for chunk in actual.chunks(index, event, usage)]


@pytest.mark.parametrize(
    ("error", "kind", "param", "code"),
    [
        (RequestError("x", param="p", code="c"), "invalid_request_error", "p", "c"),
        (RequestError("x", param="p", code="c", status=503), "server_error", None, "c"),
        (EngineError("x"), "server_error", None, None),
    ],
)
def test_errors(error: ServingError, kind: str, param: str | None, code: str | None) -> None:
    expected = {"message": "x", "type": kind, "param": param, "code": code}
    assert error_document(error) == {"error": expected}
    assert chunks(reply(prompt()), Event(error=error)) == [{"error": expected}]


def test_the_chunks_of_a_message_add_up_to_the_whole() -> None:
    events = Event("He", 1), Event("", 2), Event("y", 3, "stop")
    shown = chunks(reply(prompt()), *events)
    deltas = [chunk["choices"][0]["delta"] for chunk in shown]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "He"}, {"content": "y"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in shown] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in shown} == {"chat.completion.chunk"}
    whole: Any = reply(prompt()).whole([events])
    message = {"role": "assistant", "content": "Hey", "refusal": None}
    assert whole["choices"] == [{"index": 0, "finish_reason": "stop", "message": message, "logprobs": None}]
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")


def test_calls_have_numbers_and_the_finish_says_so() -> None:
    pieces = [CallPiece("reasoning", "r"), CallPiece("call", "f"), CallPiece("arguments", "{}")]
    more = [CallPiece("call", "g"), CallPiece("arguments", "{"), CallPiece("arguments", "}")]
    events = Event("x", 1), Event("x", 2, "stop")
    shown = chunks(reply(prompt(pieces, more)), *events)
    deltas = [chunk["choices"][0]["delta"] for chunk in shown]
    assert deltas[1] == {"reasoning_content": "r"}
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 0, 1, 1, 1]
    assert calls[0]["function"] == {"name": "f", "arguments": ""} and calls[0]["id"] == "id1"
    assert shown[-1]["choices"][0]["finish_reason"] == "tool_calls"
    whole: Any = reply(prompt(pieces, more)).whole([events])
    message = whole["choices"][0]["message"]
    assert message["content"] is None and message["reasoning_content"] == "r"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": "{}"},
    ]


def test_usage_counts_each_prompt_once() -> None:
    prompts = [Prompt(0, 10), Prompt(0, 10), Prompt(1, 4)]
    actual = reply(*prompts, chat=False)
    last = [
        Event("", 3, "stop", cached=8),
        Event("", 2, "stop", cached=9),
        Event("", 1, "length", accepted=1),
    ]
    whole: Any = actual.whole([[event] for event in last])
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (14, 6, 20)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 1
    assert "timings" not in whole, "answers share steps"
    streamed = reply(*prompts, chat=False)
    parts = [chunks(streamed, event, index=i, usage=True)[-1] for i, event in enumerate(last)]
    assert [part["usage"] for part in parts] == [None, None, usage] and parts[-1]["choices"] == []


def test_the_times_of_one_answer() -> None:
    whole: Any = reply(prompt()).whole([[Event("a", 1, "stop", cached=2, times=EngineTimes(0.5, 0.25))]])
    assert whole["timings"] == {
        "cache_n": 2, "prompt_n": 3, "prompt_ms": 500.0, "predicted_n": 1, "predicted_ms": 250.0
    }  # fmt: skip


def test_log_probabilities_of_chats_name_bytes() -> None:
    scored = Event("", 1, "stop", logprob=Logprob(8, -1.5), alternatives=(Logprob(8, -1.5), Logprob(0, -2.0)))
    whole: Any = reply(prompt()).whole([[scored]])
    (content,) = whole["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"], content["bytes"]) == ("<0xC3>", -1.5, [0xC3])
    assert [(item["token"], item["bytes"]) for item in content["top_logprobs"]] == [
        ("<0xC3>", [0xC3]),
        ("a", [97]),
    ]


def test_a_completion_repeats_its_prompt_with_scores_and_offsets() -> None:
    shown = Prompt(0, 2, "ab", tokens=(0, 1), offsets=(0, 1))
    events = (
        Event("c", 1, logprob=Logprob(2, -0.1), prompt=((Logprob(1, -3.0), (Logprob(9, -0.5),)),)),
        Event("d", 2, "length", logprob=Logprob(3, -0.2)),
    )
    whole: Any = reply(shown, chat=False).whole([events])
    (choice,) = whole["choices"]
    assert choice["text"] == "abcd" and choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -3.0, -0.1, -0.2],
        "top_logprobs": [None, {"</s>": -0.5, "b": -3.0}, {"c": -0.1}, {"d": -0.2}],
        "text_offset": [0, 1, 2, 3],
    }
    streamed = chunks(reply(shown, chat=False), *events)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "abcd"
    offsets = [
        at for chunk in streamed for at in (chunk["choices"][0]["logprobs"] or {}).get("text_offset", ())
    ]
    assert offsets == [0, 1, 2, 3]
