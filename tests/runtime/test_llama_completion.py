"""Tests of llama.cpp's /completion and /slots in documents, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlcbuild_format.errors import EngineError, RequestError
from mlcbuild_runtime.engine.request import EngineTimes, Event
from mlcbuild_runtime.openai import llama_completion
from mlcbuild_runtime.openai.chat_documents import Prompt
from mlcbuild_runtime.openai.llama_completion import LlamaOutput, completion_body


def output(prompts: list[Prompt], stated: Any) -> LlamaOutput:
    job: Any = SimpleNamespace(reply=SimpleNamespace(prompts=prompts))
    return LlamaOutput(job, "tiny", {"prompt": stated})


def test_bodies_become_those_of_openai() -> None:
    body: Any = {"prompt": "x", "n_predict": 3, "repeat_penalty": 1.5, "cache_prompt": True, "n_probs": 0}
    assert completion_body(body) == {"prompt": "x", "max_tokens": 3, "repetition_penalty": 1.5}
    for wrong in ("max_length", "echo", "logprobs"):
        with pytest.raises(RequestError) as caught:
            completion_body({"prompt": "x", wrong: 1})
        assert caught.value.param == wrong


def test_the_last_document_has_figures() -> None:
    actual = output([Prompt(0, 10)], "the prompt")
    last = Event("b", 2, "length", cached=4, times=EngineTimes(0.5, 0.0))
    first: Any = next(actual.documents(0, Event("a", 1)))
    (end,) = actual.documents(0, last)
    assert (first["content"], first["stop"], "timings" in first) == ("a", False, False)
    assert (end["stop"], end["stop_type"], end["prompt"], end["model"]) == (
        True,
        "limit",
        "the prompt",
        "tiny",
    )
    assert (end["tokens_predicted"], end["tokens_evaluated"], end["tokens_cached"]) == (2, 10, 4)
    times: Any = end["timings"]
    assert (times["prompt_n"], times["prompt_ms"], times["prompt_per_second"]) == (6, 500.0, 12.0)
    assert (times["predicted_n"], times["predicted_per_second"]) == (2, 0.0), "no time has passed"
    assert times["prompt_per_token_ms"] == pytest.approx(500 / 6, abs=1e-3)
    assert not list(actual.documents(0, Event("", 1))), "half of a character has no text yet"


def test_a_list_of_prompts_has_a_list_of_answers() -> None:
    events = [Event("a", 1, "stop")]
    two: Any = output([Prompt(0, 1), Prompt(1, 1)], ["x", "y"]).whole([events, events])
    assert [(each["index"], each["prompt"], each["stop_type"]) for each in two] == [
        (0, "x", "eos"),
        (1, "y", "eos"),
    ]
    one: Any = output([Prompt(0, 3)], [1, 2, 3]).whole([events])
    assert (one["prompt"], one["content"]) == ("", "a"), "tokens are no text"
    same: Any = output([Prompt(0, 1), Prompt(0, 1)], "x").whole([events, events])
    assert [(each["index"], each["prompt"]) for each in same] == [(0, "x"), (1, "x")], "with n = 2"


def test_an_error_has_openai_s_form() -> None:
    (document,) = output([Prompt(0, 1)], "x").documents(0, Event(error=EngineError("why")))
    assert cast(Any, document)["error"]["message"] == "why"


def test_slots_are_places_of_a_batch() -> None:
    limits = SimpleNamespace(context_window=64)
    running: Any = SimpleNamespace(
        max_batch=3, state=lambda: SimpleNamespace(running=2), manifest=SimpleNamespace(limits=limits)
    )
    slots: Any = llama_completion.slots(running)
    assert [(slot["id"], slot["is_processing"]) for slot in slots] == [(0, True), (1, True), (2, False)]
    assert {slot["n_ctx"] for slot in slots} == {64}
