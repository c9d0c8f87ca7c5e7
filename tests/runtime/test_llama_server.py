"""Tests of the endpoints of llama.cpp's server, and of OpenAI's endpoints without the prefix /v1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from mlcbuild_runtime import release

from . import parrot, shared
from .parrot import say
from .shared import Server
from .test_server import HI


@pytest.fixture(scope="module")
def sayer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundle = tmp_path_factory.mktemp("llama") / "toy"
    parrot.write(bundle)
    with parrot.serving(bundle) as running:
        yield running


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=shared.WAIT, verify=shared.PLAIN)


def get(server: Server, path: str) -> Any:
    return httpx.get(f"{server.url}{path}", timeout=shared.WAIT, verify=shared.PLAIN).json()


def prompt(text: str) -> str:
    """Returns a prompt that the simulated model continues with `text`."""
    return f"{say(text)}<|assistant|>"


def test_a_completion(sayer: Server) -> None:
    asked: dict[str, Any] = {"prompt": prompt("one two"), "cache_prompt": True, "n_probs": 0}
    document = post(sayer, "/completion", **asked).json()
    assert (document["content"], document["stop"], document["stop_type"]) == ("one two", True, "eos")
    assert document["timings"]["predicted_n"] == document["tokens_predicted"] > 0
    assert document["timings"]["predicted_per_second"] > 0 and document["prompt"] == asked["prompt"]
    cut = post(sayer, "/completion", **asked, n_predict=2).json()
    assert (cut["tokens_predicted"], cut["stop_type"]) == (2, "limit")
    lines = post(sayer, "/completion", **asked, stream=True).text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(part["content"] for part in parts) == "one two"
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    several = post(sayer, "/completion", prompt=[prompt("a"), prompt("b")]).json()
    assert [(item["index"], item["content"]) for item in several] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "grammar": "root ::= x"}, "unknown field 'grammar'"),
        ({"prompt": "a", "echo": True}, "unknown field 'echo'"),
        ({"prompt": "a", "mirostat": 2}, "mirostat is 2, which this server does not support"),
        ({}, "prompt must be"),
    ],
)
def test_bodies_that_are_refused(sayer: Server, fields: dict[str, Any], message: str) -> None:
    response = post(sayer, "/completion", **fields)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_tokens_and_templates(sayer: Server) -> None:
    plain = post(sayer, "/tokenize", content="one two").json()["tokens"]
    special = post(sayer, "/tokenize", content="one two", add_special=True).json()["tokens"]
    assert special == post(sayer, "/tokenize", prompt="one two").json()["tokens"]
    assert special[-len(plain) :] == plain
    pieces = post(sayer, "/tokenize", content="one é", with_pieces=True).json()["tokens"]
    data = b"".join(
        bytes(item["piece"]) if isinstance(item["piece"], list) else item["piece"].encode() for item in pieces
    )
    assert data.decode() == "one é"
    assert post(sayer, "/detokenize", tokens=plain).json()["content"] == "one two"
    rendered = post(sayer, "/apply-template", messages=HI).json()["prompt"]
    tokens = post(sayer, "/tokenize", messages=HI).json()["tokens"]
    assert post(sayer, "/tokenize", content=rendered).json()["tokens"] == tokens
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    whole = post(sayer, "/apply-template", messages=HI, tools=[tool], stream=True, max_tokens=5).json()
    assert '"name":"add"' in whole["prompt"], "the body is that of a chat"


def test_descriptions(sayer: Server) -> None:
    reply = get(sayer, "/props")
    assert reply["default_generation_settings"]["n_ctx"] == parrot.CONTEXT
    assert (reply["model_alias"], reply["bos_token"]) == (sayer.name, "<s>")
    listed = get(sayer, f"/slots?model={sayer.name}")
    assert len(listed) == reply["total_slots"] and not any(slot["is_processing"] for slot in listed)
    assert "is not here" in get(sayer, "/slots?model=other")["error"]["message"]


def test_paths_without_v1(sayer: Server) -> None:
    messages: Any = [{"role": "user", "content": say("five")}]
    with openai.OpenAI(base_url=sayer.url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=sayer.name, messages=messages)
        assert answer.choices[0].message.content == "five"
        assert client.models.list().data[0].id == sayer.name
        assert client.models.retrieve(sayer.name).id == sayer.name
    refused = post(sayer, "/messages", messages=messages)
    assert refused.json()["type"] == "error", "the form of errors follows the path"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score", "/redoc", "/nowhere"])
def test_an_unknown_path_names_those_that_exist(sayer: Server, path: str) -> None:
    message = get(sayer, path)["error"]["message"]
    assert message.startswith(f"there is no path {path}: there are /v1/models, /v1/chat/completions,")
    for name in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/api/...", "/completion", "/version"):
        assert f" {name}," in message
    assert message.endswith("; /openapi.json describes them") and "{" not in message
    response = httpx.get(f"{sayer.url}/v1/chat/completions", timeout=shared.WAIT)
    assert response.status_code == 405
    assert response.json()["error"]["message"] == "/v1/chat/completions does not take GET: it takes POST"


def test_the_health_checks_of_vllm(sayer: Server) -> None:
    assert httpx.post(f"{sayer.url}/ping").status_code == 200 and get(sayer, "/ping") == {"live": True}
    assert get(sayer, "/version") == {"version": release.installed()}
