"""Tests of requests for the engine, made of bodies: prompts, numbers of answers, and what an engine cannot
do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mlcbuild_format.bundle import Serving
from mlcbuild_format.errors import EngineError, RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.engine.request import Request, Ticket
from mlcbuild_runtime.openai import service

from .grammars import GRAMMARS, SIZE, TOKENIZERS

TOKENIZER = TOKENIZERS["json"]
CONTEXT = 64


class Running:
    """A stand-in for the engine that only stores the requests submitted to it. It has the tokenizer and the
    grammars of the small model in recipes/models, and a context of 64 tokens; it refuses requests beyond
    `room`."""

    name = "tiny"
    tokenizer = TOKENIZER
    grammars = GRAMMARS["json"]
    longest_text = 10_000

    def __init__(self, room: int = 100) -> None:
        self.manifest = SimpleNamespace(
            serving=Serving(), vocab_size=SIZE, limits=SimpleNamespace(context_window=CONTEXT)
        )
        self.room, self.submitted = room, list[Ticket]()

    def submit(self, request: Request, sink: Any, window: int) -> Ticket:
        if len(self.submitted) >= self.room:
            raise EngineError("full")
        self.submitted.append(Ticket(lambda: None, window))
        return self.submitted[-1]


def running(room: int = 100) -> Any:
    return Running(room)


HI: list[Json] = [{"role": "user", "content": "hi"}]
TOOLS: list[Json] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_a_chat_is_the_rendered_template() -> None:
    job = service.chat(running(), {"messages": HI, "n": 3, "max_tokens": 7, "seed": 5})
    text = TOKENIZER.rendered([{"role": "user", "content": "hi"}], {}, 100)
    assert {request.prompt for request in job.requests} == {
        tuple(TOKENIZER.vocabulary.encode(text, special=False))
    }
    assert [request.sampling.choice for request in job.requests] == [0, 1, 2]
    assert all(request.message and request.max_tokens == 7 for request in job.requests)
    assert [prompt.number for prompt in job.reply.prompts] == [0, 0, 0] and not job.stream


def test_texts_and_tokens_are_prompts_of_completions() -> None:
    tokens = TOKENIZER.encode("once upon")
    job = service.completion(running(), {"prompt": ["once upon", "a"], "n": 2})
    assert [request.prompt for request in job.requests[:2]] == [tuple(tokens)] * 2
    assert [prompt.number for prompt in job.reply.prompts] == [0, 0, 1, 1]
    assert {request.max_tokens for request in job.requests} == {service.COMPLETION_TOKENS}
    long: list[Json] = [7] * (CONTEXT - 3)
    (request,) = service.completion(running(), {"prompt": long}).requests
    assert request.max_tokens == 3 and not request.message, "as many as fit"


def test_an_echo_with_scores_needs_the_prompt_s() -> None:
    job = service.completion(running(), {"prompt": "once upon", "echo": True, "logprobs": 1})
    (prompt,) = job.reply.prompts
    assert job.requests[0].prompt_logprobs and prompt.tokens == job.requests[0].prompt
    assert prompt.echo == "once upon" and len(prompt.offsets) == len(prompt.tokens)
    plain = service.completion(running(), {"prompt": "once upon", "echo": True})
    assert not plain.requests[0].prompt_logprobs and plain.reply.prompts[0].tokens == ()


def test_too_many_scores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_SCORES", 11)
    body: dict[str, Json] = {"prompt": [1, 2, 3], "echo": True, "logprobs": 1, "n": 2}
    with pytest.raises(RequestError, match="at most 11 log-probabilities of prompts, found 12: send"):
        service.completion(running(), body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"logit_bias": {str(SIZE): 1}}, f"logit_bias names token {SIZE}, but the vocabulary has {SIZE}"),
        (
            {"min_tokens": 2, "response_format": {"type": "json_object"}},
            "min_tokens cannot be combined with a response format",
        ),
        (
            {"min_tokens": 2, "tools": TOOLS, "tool_choice": "auto"},
            r"or tools, .*: leave min_tokens out, or send no format and no tools \(or tool_choice 'none'\)",
        ),
    ],
)
def test_what_a_request_cannot_have(body: dict[str, Json], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        service.chat(running(), {"messages": HI, **body})


def test_an_answer_with_a_least_length_has_ends_to_avoid() -> None:
    body: dict[str, Json] = {"messages": HI, "min_tokens": 2, "stop_token_ids": [9, SIZE + 5]}
    variants: list[dict[str, Json]] = [{}, {"tools": TOOLS, "tool_choice": "none"}]
    for more in variants:
        (request,) = service.chat(running(), body | more).requests
        assert request.sampling.ends == tuple(sorted({*TOKENIZER.eos, 9}))


def test_formats_are_compiled_and_predictions_cut() -> None:
    assert service.constrained({"response_format": {"type": "json_object"}})
    assert service.constrained({"guided_regex": "a"}) and not service.constrained({"tools": []})
    body: dict[str, Json] = {"messages": HI, "response_format": {"type": "json_object"}}
    assert service.chat(running(), body).requests[0].constraint is not None
    predicted: dict[str, Json] = {"prediction": {"type": "content", "content": "once " * 100}}
    (request,) = service.chat(running(), {"messages": HI, **predicted}).requests
    tokens = TOKENIZER.vocabulary.encode("once " * 100, special=False)
    assert request.prediction == tuple(tokens[:CONTEXT]) and len(tokens) > CONTEXT


def test_all_requests_are_submitted_or_none() -> None:
    requests = service.completion(running(), {"prompt": "a", "n": 3}).requests
    full = running(room=2)
    with pytest.raises(EngineError, match="full"):
        service.submit(full, requests, [print] * 3, 8)
    assert [ticket.cancelled for ticket in full.submitted] == [True, True]
    roomy = running()
    tickets = service.submit(roomy, requests, [print] * 3, 8)
    assert tickets == roomy.submitted and not any(ticket.cancelled for ticket in tickets)


def test_only_the_served_model_s_name_is_right() -> None:
    service.check_model(running(), None)
    service.check_model(running(), "tiny")
    with pytest.raises(RequestError, match="the model 'other' is not here: this server has 'tiny'") as caught:
        service.check_model(running(), "other")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_tokens_and_texts_of_both_apis() -> None:
    text = "once 🙂"
    plain = TOKENIZER.vocabulary.encode(text, special=False)
    with_bos: Any = service.tokenize(running(), {"prompt": text})
    assert with_bos["tokens"] == TOKENIZER.encode(text) and with_bos["max_model_len"] == CONTEXT
    assert service.tokenize(running(), {"prompt": text, "add_special_tokens": False})["tokens"] == plain
    assert service.tokenize(running(), {"content": text})["tokens"] == plain
    listed: Any = service.tokenize(running(), {"content": text, "with_pieces": True})["tokens"]
    assert [each["id"] for each in listed] == plain
    data = [bytes(p) if isinstance(p := each["piece"], list) else p.encode() for each in listed]
    assert b"".join(data).decode().strip() == text
    chat: Any = service.tokenize(running(), {"messages": HI})
    assert chat["tokens"] == list(service.chat(running(), {"messages": HI}).requests[0].prompt)
    assert service.detokenize(running(), {"tokens": [*plain]})["prompt"] == TOKENIZER.decode(plain)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([SIZE], f"a list of tokens from 0 to {SIZE - 1}"),
        ([-1], "from 0 to"),
        ([True], "from 0 to"),
        ("x", "from"),
    ],
)
def test_tokens_that_are_none(tokens: Json, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        service.detokenize(running(), {"tokens": tokens})
    assert caught.value.param == "tokens"
    with pytest.raises(RequestError, match="prompt must be a text, if there are no messages"):
        service.tokenize(running(), {})
