"""Tests of the endpoints of llama.cpp's server, without a server process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.llama_endpoints import LlamaEndpoints

from . import in_process, parrot
from .parrot import say

LONG = "more than sixteen tokens, since each letter is one"
PROMPT = f"{say(LONG)}<|assistant|>"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with in_process.running(tmp_path_factory.mktemp("llama") / "toy") as engine:
        yield engine


def post(engine: Engine, path: str, access: Access | None = None, **body: Any) -> Any:
    return in_process.send(LlamaEndpoints, engine, ("POST", path, body), access=access)[0].json()


def test_an_answer_has_no_short_default_of_tokens(engine: Engine) -> None:
    whole = post(engine, "/completion", prompt=PROMPT)
    assert (whole["content"], whole["stop_type"]) == (LONG, "eos")
    assert whole["tokens_predicted"] == len(LONG) + 1, "and the end-of-sequence token"
    cut = post(engine, "/completion", prompt=PROMPT, n_predict=4)
    assert (cut["content"], cut["stop_type"]) == (LONG[:4], "limit")


def test_the_server_s_limit_of_tokens_holds(engine: Engine) -> None:
    assert post(engine, "/completion", Access(max_tokens=3), prompt=PROMPT)["content"] == LONG[:3]


def test_a_stream_is_server_sent_events_of_compact_json(engine: Engine) -> None:
    body = {"prompt": f"{say('é y')}<|assistant|>", "stream": True}
    (response,) = in_process.send(LlamaEndpoints, engine, ("POST", "/completion", body))
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last = response.text.split("\n\n")
    assert last == "" and all(line.startswith('data: {"index":0,"content":"') for line in lines)
    documents = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [document["content"] for document in documents] == ["é", " ", "y", ""]
    assert [document["stop"] for document in documents] == [False] * 3 + [True]
    assert "é" in response.text


def test_several_prompts_have_several_answers(engine: Engine) -> None:
    prompts = [f"{say(text)}<|assistant|>" for text in "ab"]
    answers = post(engine, "/completion", prompt=prompts)
    assert [(answer["index"], answer["content"]) for answer in answers] == [(0, "a"), (1, "b")]


def test_a_template_is_applied(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert post(engine, "/apply-template", messages=messages) == {
        "prompt": "<s><|user|>hi\n<|assistant|>",
    }


def test_a_model_is_described(engine: Engine) -> None:
    requests = [("GET", path, None) for path in ("/props", f"/slots?model={engine.name}")]
    properties, slots = (response.json() for response in in_process.send(LlamaEndpoints, engine, *requests))
    assert properties["default_generation_settings"]["n_ctx"] == parrot.CONTEXT
    assert len(slots) == properties["total_slots"] == engine.max_batch
    with pytest.raises(RequestError, match="'other' is not here"):
        in_process.send(LlamaEndpoints, engine, ("GET", "/slots?model=other", None))


def test_refused_requests_return_their_reference_to_the_model(engine: Engine) -> None:
    bodies: tuple[dict[str, Any], ...] = ({"prompt": "a", "echo": True}, {}, {"prompt": "a", "model": 5})
    for body in bodies:
        with pytest.raises(RequestError):
            post(engine, "/completion", **body)
