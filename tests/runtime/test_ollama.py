"""Tests of Ollama's endpoints /api: bodies become chats and completions, answers become JSON lines, and
Ollama's client understands them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai.ollama_request import chat_body, embedding_input, generate_body, model_name

from . import parrot, shared
from .parrot import say
from .shared import Server
from .test_reasoning import TEMPLATE
from .tool_forms import HERMES, SCHEMA

if TYPE_CHECKING:
    import ollama
else:
    ollama = pytest.importorskip("ollama", reason="the client of Ollama is not installed")

HI: Json = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CALLED = "<think>\nHm.\n</think>\n\nFour. " + HERMES.write("add", {"a": 1, "b": "x"})


def test_messages_and_options_become_those_of_a_chat() -> None:
    call: Json = {"function": {"name": "add", "arguments": {"a": 1}}}
    other: Json = {"id": "mine", "function": {"name": "sub", "arguments": {}}}
    messages: Json = [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "c", "thinking": "b", "tool_calls": [call, other, call]},
        {"role": "tool", "tool_name": "sub", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "tool_call_id": "unheard", "content": "3"},
    ]
    options: Json = {"num_predict": 5, "top_k": -1, "repeat_penalty": 1.1, "num_ctx": 64, "num_gpu": 1}
    body: dict[str, Json] = {"messages": messages, "options": options, "tools": [TOOL], "think": "low"}
    chat = chat_body({**body, "keep_alive": "5m", "format": "json", "model": "x:latest"}, 64)
    arguments = {"name": "add", "arguments": '{"a": 1}'}
    calls = [
        {"id": "000000000", "type": "function", "function": arguments},
        {"id": "mine", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
        {"id": "000000002", "type": "function", "function": arguments},
    ]
    assert chat["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "c", "reasoning_content": "b", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "mine"},
        {"role": "tool", "content": "2", "tool_call_id": "000000000"},
        {"role": "tool", "content": "3", "tool_call_id": "unheard"},
    ]
    assert (chat["max_tokens"], chat["top_k"], chat["repetition_penalty"]) == (5, 0, 1.1)
    assert (chat["stream"], chat["reasoning_effort"]) == (True, "low")
    assert chat["response_format"] == {"type": "json_object"}
    assert model_name({"model": "x:latest"}) == model_name({"name": "x"}) == "x" and model_name({}) is None
    assert model_name({"model": "", "name": "x"}) == "x" and model_name({"model": "", "name": ""}) is None
    for field in ("model", "name"):
        with pytest.raises(RequestError, match=f"{field} must be a text"):
            model_name({field: 1})


class Compared(str):
    """A string type for counting: its `total` is the number of equality comparisons of all such strings."""

    total = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.total += 1
        return str.__eq__(self, other)


def test_results_find_their_calls_in_any_order_and_number() -> None:
    """Checks that tool results find their calls without searching all of them, measured in comparisons: a
    body may have 100,000 calls and results."""
    size = 500
    calls: list[Json] = [
        {"id": f"c{i}", "function": {"name": Compared(f"f{i % 3}"), "arguments": {}}} for i in range(size)
    ]
    results: list[Json] = [{"role": "tool", "tool_name": Compared("f1")} for _ in range(size // 3)]
    results += [{"role": "tool", "tool_call_id": Compared(f"c{i}")} for i in range(size - 2, 0, -3)]
    results += [{"role": "tool", "tool_name": Compared("other")} for _ in range(size)]
    results += [{"role": "tool"} for _ in range(size // 3 + 5)]
    Compared.total = 0
    messages = chat_body({"messages": [{"role": "assistant", "tool_calls": calls}, *results]}, 64)["messages"]
    assert Compared.total < 10 * size
    assert isinstance(messages, list)
    actual = [message["tool_call_id"] for message in messages[1:] if isinstance(message, dict)]
    first, rest = size // 3, [f"c{i}" for i in range(size)]
    assert actual[:first] == rest[1::3][:first]
    assert actual[-3:] == ["", "", ""] and actual[-5:-3] == rest[-3:-2] + rest[-1:]


def test_a_prompt_becomes_a_chat_or_a_text() -> None:
    body: dict[str, Json] = {"prompt": "a", "system": "s", "think": False, "options": {"num_predict": -1}}
    chat = generate_body(body, 64, has_template=True)
    assert chat["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert chat["enable_thinking"] is False and "max_tokens" not in chat
    assert generate_body(body, 64, has_template=False)["prompt"] == "s\na"
    text = generate_body({"prompt": "a", "raw": True, "format": {"type": "object"}}, 64, has_template=True)
    assert text["prompt"] == "a" and text["response_format"]
    assert generate_body({"prompt": "a", "raw": True, "system": ""}, 64, has_template=True)["prompt"] == "a"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt must be a text; it is missing"),
        ({"prompt": ""}, "prompt has an empty text, which has no embedding"),
        ({"prompt": 1}, "prompt must be a text; found 1"),
    ],
)
def test_the_text_of_an_embedding_is_the_prompt(body: dict[str, Json], message: str) -> None:
    assert embedding_input({"prompt": "a"}) == (["a"], True, None)
    with pytest.raises(RequestError) as caught:
        embedding_input(body)
    assert (caught.value.param, str(caught.value)) == ("prompt", message)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": 1}, "messages", "a list of messages"),
        ({"messages": [1]}, "messages[0]", "a role"),
        ({"messages": [{"role": "user", "images": ["x"]}]}, "messages[0].images", "reads text only"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls", "a list of calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [1]}]},
            "messages[0].tool_calls[0]",
            "a call such as",
        ),
        ({"messages": [{"role": "tool", "tool_name": 1}]}, "tool_name", "a text"),
        ({"think": "much"}, "think", "true, false or one of low, medium, high"),
        ({"format": "xml"}, "format", '"json" or a JSON schema'),
        ({"options": {"num_ctx": 65}}, "options.num_ctx", "was built for 64 tokens: leave it out, or build"),
        ({"options": {"warmth": 1}}, "options.warmth", "is unknown: this server has f16_kv, "),
        ({"options": {"temperature": 9}}, "temperature", "a number from 0 to 2"),
        ({"messages": HI, "template": "x"}, "template", "unknown field 'template'"),
    ],
)
def test_bodies_that_are_refused(fields: dict[str, Json], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        chat_body({"messages": HI, **fields}, 64)
    assert caught.value.param == param


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundle = tmp_path_factory.mktemp("ollama") / "toy"
    parrot.write(bundle, TEMPLATE)
    with parrot.serving(bundle) as running:
        yield running


@pytest.fixture
def client(thinker: Server) -> Iterator[ollama.Client]:
    with closing(ollama.Client(host=thinker.url, trust_env=False)) as actual:
        yield actual


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/api/{path}", json=body, timeout=shared.WAIT, verify=shared.PLAIN)


def test_a_chat_with_its_own_client(thinker: Server, client: ollama.Client) -> None:
    asked: dict[str, Any] = {"model": f"{thinker.name}:latest", "tools": [TOOL]}
    asked["messages"] = [{"role": "user", "content": say(CALLED)}]
    whole = client.chat(**asked)
    assert (whole.message.thinking, whole.message.content) == ("Hm.", "Four. ")
    assert whole.message.tool_calls
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": "x"})
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", thinker.name)
    chunks = list(client.chat(**asked, stream=True))
    assert "".join(chunk.message.thinking or "" for chunk in chunks) == "Hm."
    assert "".join(chunk.message.content or "" for chunk in chunks) == "Four. "
    assert [call for chunk in chunks for call in chunk.message.tool_calls or ()] == [call]
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].eval_count == whole.eval_count and (whole.prompt_eval_count or 0) > 50
    assert (whole.eval_duration or 0) > 0
    asked["messages"] += [whole.message, {"role": "tool", "tool_name": "add", "content": say("5")}]
    assert client.chat(**asked).message.content == "5"
    cut = client.chat(**{**asked, "messages": asked["messages"][:1]}, options={"num_predict": 12})
    assert (cut.done_reason, cut.eval_count) == ("length", 12)


def test_a_format_binds_the_answer(client: ollama.Client, thinker: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    messages = [{"role": "user", "content": say("no JSON at all")}]
    actual = client.chat(model=thinker.name, messages=messages, format=schema, think=False)
    assert isinstance(json.loads(actual.message.content or "")["n"], int)
    options = {"num_predict": 200}
    text = client.generate(
        model=thinker.name, prompt=say("none"), format="json", think=False, options=options
    )
    assert (text.response or "").startswith("{")


def test_a_prompt_with_its_own_client(thinker: Server, client: ollama.Client) -> None:
    asked: dict[str, Any] = {"model": thinker.name, "prompt": say("<think>Hm.</think>Four."), "system": "s"}
    whole = client.generate(**asked)
    assert (whole.response, whole.thinking, whole.done_reason) == ("Four.", "Hm.", "stop")
    chunks = list(client.generate(**asked, stream=True))
    assert "".join(chunk.response or "" for chunk in chunks) == "Four."
    raw = client.generate(model=thinker.name, prompt="a", raw=True, options={"num_predict": 3})
    assert raw.done and (raw.eval_count or 0) <= 3
    parts: tuple[tuple[str, dict[str, Any]], ...] = (("generate", {}), ("chat", {"messages": []}))
    for path, part in parts:
        for keep_alive, reason in ((0, "unload"), ("5m", "load")):
            document = post(thinker, path, keep_alive=keep_alive, **part).json()
            assert (document["done"], document["done_reason"]) == (True, reason)


def test_models_and_errors_with_its_own_client(thinker: Server, client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == thinker.name and (model.size or 0) > 0
    assert [item.model for item in client.ps().models] == [thinker.name]
    shown = client.show(thinker.name)
    assert shown.template == TEMPLATE
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities or ())
    assert post(thinker, "show", name=thinker.name).json()["details"]["format"] == "mlcbuild"
    assert "version" in httpx.get(f"{thinker.url}/api/version", verify=shared.PLAIN).json()
    with pytest.raises(ollama.ResponseError, match="is not here: this server has") as caught:
        client.chat(model="other", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.status_code == 404
    refused = post(thinker, "chat", messages=HI, template="x")
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    assert thinker.wait_idle()["status"] == "ok"


@pytest.fixture(scope="module")
def real(tiny_bundle: Path) -> Iterator[Server]:
    with shared.serving(tiny_bundle) as running:
        yield running


def test_vectors_for_the_client_of_ollama(real: Server) -> None:
    with closing(ollama.Client(host=real.url, trust_env=False)) as client:
        one, two = client.embed(model=real.name, input=["once", "upon"]).embeddings
        assert client.embed(model=real.name, input="once").embeddings == [one] and one != two
        assert client.embeddings(model=real.name, prompt="upon").embedding == two
        body = {"input": "once", "model": real.name}
        response = httpx.post(
            f"{real.url}/v1/embeddings", json=body, verify=shared.PLAIN, timeout=shared.WAIT
        )
        assert response.json()["data"][0]["embedding"] == pytest.approx(one)
        cut = client.embed(model=real.name, input="once " * 900, dimensions=4)
        assert len(cut.embeddings[0]) == 4 and 0 < (cut.prompt_eval_count or 0) < 900
        with pytest.raises(ollama.ResponseError, match="the context has no room for more than"):
            client.embed(model=real.name, input="once " * 900, truncate=False)
        assert list(client.embed(model=real.name, input=[]).embeddings) == []
        with pytest.raises(ollama.ResponseError, match="the model 'other' is not here"):
            client.embed(model="other", input=[])
        with pytest.raises(ollama.ResponseError, match="more than 262144 tokens in all"):
            client.embed(model=real.name, input=["a " * 300] * 1030)
        with pytest.raises(ollama.ResponseError, match="input has 2049 texts; at most 2048"):
            client.embed(model=real.name, input=["a"] * 2049)
        with pytest.raises(ollama.ResponseError, match="input has an empty text"):
            client.embed(model=real.name, input="")
        refused = post(real, "embed", input=[1]).json()
        assert refused == {"error": "input must be a text or a list of texts; found 1"}
