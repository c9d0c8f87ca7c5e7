"""Tests of the HTTP API of a real server process, with OpenAI's client and with plain requests."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import shared, toy
from .shared import Server

HI: Any = [{"role": "user", "content": "hi"}]


def text_of(bundle: Path, prompt: list[int], count: int) -> str:
    """Returns the text that greedy decoding of the toy model must produce after a prompt, up to the
    end-of-sequence token. bundle: the directory whose tokenizer is used; prompt: its tokens; count: maximum
    number of tokens."""
    tokens = toy.expected(prompt, count)
    if toy.EOS in tokens:
        tokens = tokens[: tokens.index(toy.EOS)]
    return Tokenizer.load(bundle).decode(tokens)


def post(server: Server, path: str, body: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}{path}", content=content, timeout=shared.WAIT, verify=shared.PLAIN)


def test_the_ready_line_tells_what_runs(server: Server) -> None:
    assert server.ready.startswith("mlcbuild-serve: toy-q0f32-host is ready at http://127.0.0.1:")
    assert "context 256, batch 4" in server.ready


def test_models(client: openai.OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (server.name, "mlcbuild")
    assert client.models.retrieve(server.name) == model
    with pytest.raises(openai.NotFoundError, match="the model 'other/one' is not here"):
        client.models.retrieve("other/one")


def test_health(server: Server) -> None:
    state = server.wait_idle()
    assert (state["status"], state["model"]) == ("ok", server.name)
    assert state["free_pages"] == state["pages"] == 64


def test_chat(client: openai.OpenAI, server: Server, toy_bundle: Path) -> None:
    prompt = Tokenizer.load(toy_bundle).chat(HI)
    reply = client.chat.completions.create(model=server.name, messages=HI, max_tokens=12)
    assert reply.choices[0].message.content == text_of(toy_bundle, prompt, 12)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 12)
    assert reply.usage.total_tokens == len(prompt) + 12


def test_a_streamed_chat_is_the_same(client: openai.OpenAI, server: Server) -> None:
    whole = client.chat.completions.create(model=server.name, messages=HI, max_completion_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model=server.name,
            messages=HI,
            max_completion_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions(client: openai.OpenAI, server: Server, toy_bundle: Path) -> None:
    prompt = Tokenizer.load(toy_bundle).encode("once upon")
    whole = client.completions.create(model=server.name, prompt="once upon")
    assert whole.choices[0].text == text_of(toy_bundle, prompt, 16)
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    by_tokens = client.completions.create(model=server.name, prompt=prompt, max_tokens=16)
    in_list = client.completions.create(model=server.name, prompt=["once upon"], max_tokens=16)
    assert by_tokens.choices[0].text == in_list.choices[0].text == whole.choices[0].text
    stream = client.completions.create(model=server.name, prompt=[prompt], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_the_end_token_stops(client: openai.OpenAI, server: Server, toy_bundle: Path) -> None:
    prompt = next(p for i in range(256) if toy.expected(p := [i, 3], 60).count(toy.EOS))
    place = toy.expected(prompt, 60).index(toy.EOS)
    reply = client.completions.create(model=server.name, prompt=prompt, max_tokens=60)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == text_of(toy_bundle, prompt, 60)
    assert reply.usage is not None and reply.usage.completion_tokens == place + 1


def test_stop_strings(client: openai.OpenAI, server: Server, toy_bundle: Path) -> None:
    whole = client.completions.create(model=server.name, prompt="stop", max_tokens=60).choices[0].text
    stop = whole[30:33]
    stopped = client.completions.create(model=server.name, prompt="stop", max_tokens=60, stop=stop)
    assert stopped.choices[0].text == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    stream = client.completions.create(
        model=server.name, prompt="stop", max_tokens=60, stop=["never seen", stop], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole[: whole.index(stop)]


def test_seeds(client: openai.OpenAI, server: Server) -> None:
    def ask(seed: int | None) -> str:
        reply = client.completions.create(
            model=server.name, prompt="x", max_tokens=20, temperature=1.3, top_p=0.95, seed=seed
        )
        return reply.choices[0].text

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) == 4
    assert ask(None) != ask(None)


def test_logprobs(client: openai.OpenAI, server: Server) -> None:
    reply = client.chat.completions.create(
        model=server.name, messages=HI, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None and len(content) == 3
    assert all(
        item.top_logprobs[0].logprob == item.logprob > item.top_logprobs[1].logprob for item in content
    )
    older = client.completions.create(model=server.name, prompt="x", max_tokens=3, logprobs=1)
    actual = older.choices[0].logprobs
    assert actual is not None and actual.token_logprobs is not None and len(actual.token_logprobs) == 3
    assert actual.text_offset is not None and actual.text_offset[0] == 0


def test_many_clients_get_the_text_they_get_alone(server: Server, toy_bundle: Path) -> None:
    def ask(i: int) -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            if i % 2:
                stream = client.completions.create(
                    model=server.name, prompt=f"number {i}", max_tokens=50, stream=True
                )
                return "".join(chunk.choices[0].text for chunk in stream)
            reply = client.completions.create(model=server.name, prompt=f"number {i}", max_tokens=50)
            return reply.choices[0].text

    tokenizer = Tokenizer.load(toy_bundle)
    expected = [text_of(toy_bundle, tokenizer.encode(f"number {i}"), 50) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == expected


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


ERRORS: list[tuple[str, object, int, str | None, str]] = [
    (COMPLETION, b"{", 400, None, "the body is not valid JSON"),
    (COMPLETION, b"", 400, None, "the body is not valid JSON"),
    (COMPLETION, b'{"prompt": "\xff"}', 400, None, "the body is not UTF-8: invalid start byte at byte 12"),
    (COMPLETION, b'{"prompt": "x", "temperature": NaN}', 400, None, "NaN is not JSON"),
    (COMPLETION, b'{"prompt": "x", "top_p": -Infinity}', 400, None, "-Infinity is not JSON"),
    (COMPLETION, b'{"prompt": "x", "temperature": 1e999}', 400, "temperature", "from 0 to 2; found inf"),
    (COMPLETION, b"[" * 100_000, 400, None, "nested too deeply"),
    (COMPLETION, b'{"seed": ' + b"9" * 5000 + b"}", 400, None, "not valid JSON"),
    (COMPLETION, [1], 400, None, "the body must be a JSON object"),
    (
        COMPLETION,
        {},
        400,
        "prompt",
        "prompt must be a text, a list of tokens, or a list of these; it is missing",
    ),
    (COMPLETION, {"prompt": ["a", 1]}, 400, "prompt", "must be a text, a list of tokens, or a list of these"),
    (COMPLETION, {"prompt": ["a"] * 65, "n": 2}, 400, "prompt", "65 prompts with n = 2 are more than 128"),
    (COMPLETION, {"prompt": "x", "n": 0}, 400, "n", "an integer from 1 to 128"),
    (COMPLETION, {"prompt": "x", "n": True}, 400, "n", "an integer from 1 to 128"),
    (
        COMPLETION,
        {"prompt": ["x" * 200] * 128, "echo": True, "logprobs": 20},
        400,
        "logprobs",
        "at most 524288 log-probabilities of prompts, found 540288: send fewer prompts",
    ),
    (COMPLETION, {"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty", "a number from -2 to 2"),
    (COMPLETION, {"prompt": "x", "frequency_penalty": "a"}, 400, "frequency_penalty", "from -2 to 2"),
    (COMPLETION, {"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty", "from 0.01 to 100"),
    (COMPLETION, {"prompt": "x", "logit_bias": [1]}, 400, "logit_bias", "must be an object"),
    (COMPLETION, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "each with a number from -100"),
    (
        COMPLETION,
        {"prompt": "x", "logit_bias": {"1": 101}},
        400,
        "logit_bias",
        "each with a number from -100",
    ),
    (
        COMPLETION,
        {"prompt": "x", "logit_bias": {"260": 1}},
        400,
        "logit_bias",
        "the vocabulary has 260 tokens",
    ),
    (COMPLETION, {"prompt": "x", "ignore_eos": 1}, 400, "ignore_eos", "true or false"),
    (COMPLETION, {"prompt": "x", "priority": 1.5}, 400, "priority", "an integer from -1000 to 1000"),
    ("/tokenize", {}, 400, "prompt", "a text, if there are no messages; it is missing"),
    ("/tokenize", {"text": "x"}, 400, "text", "unknown field 'text'"),
    ("/detokenize", {"tokens": [260]}, 400, "tokens", "a list of tokens from 0 to 259"),
    ("/detokenize", {}, 400, "tokens", "it is missing"),
    (COMPLETION, {"prompt": []}, 400, "prompt", "a text, a list of tokens, or a list of these"),
    (COMPLETION, {"prompt": [1, True]}, 400, "prompt", "must be a text, a list of tokens"),
    (COMPLETION, {"prompt": [260]}, 400, "prompt", "token 260 is outside the vocabulary"),
    (COMPLETION, {"prompt": "\ud800"}, 400, "prompt", "half of a surrogate pair"),
    (COMPLETION, {"prompt": "x", "model": "other"}, 404, "model", "the model 'other' is not here"),
    (COMPLETION, {"prompt": "x", "model": 3}, 400, "model", "model must be a text; found 3"),
    (COMPLETION, {"prompt": "x", "max_tokens": -2}, 400, "max_tokens", "an integer from 0 to"),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens", "an integer from 1 to"),
    (COMPLETION, {"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens", "found 1.5"),
    (COMPLETION, {"prompt": "x", "max_tokens": True}, 400, "max_tokens", "found True"),
    (COMPLETION, {"prompt": "x", "max_tokens": 255}, 400, None, "257 together, but the context has 256"),
    (COMPLETION, {"prompt": [1] * 256}, 400, None, "256 tokens, but the context has 256"),
    (COMPLETION, {"prompt": [1] * 257, "max_tokens": 0}, 400, None, "257 tokens, but the context has 256"),
    (COMPLETION, {"prompt": "x", "temperature": -0.1}, 400, "temperature", "a number from 0 to 2"),
    (COMPLETION, {"prompt": "x", "temperature": "hot"}, 400, "temperature", "found 'hot'"),
    (COMPLETION, {"prompt": "x", "top_p": 1.1}, 400, "top_p", "a number from 0 to 1"),
    (COMPLETION, {"prompt": "x", "min_p": 2}, 400, "min_p", "a number from 0 to 1"),
    (COMPLETION, {"prompt": "x", "top_k": -2}, 400, "top_k", "an integer from 0"),
    (COMPLETION, {"prompt": "x", "seed": 1 << 63}, 400, "seed", "an integer from"),
    (COMPLETION, {"prompt": "x", "stop": ""}, 400, "stop", "non-empty strings"),
    (COMPLETION, {"prompt": "x", "stop": [1]}, 400, "stop", "non-empty strings"),
    (COMPLETION, {"prompt": "x", "stop": ["a"] * 17}, 400, "stop", "at most 16 strings"),
    (COMPLETION, {"prompt": "x", "stop": {}}, 400, "stop", "a string or a list"),
    (COMPLETION, {"prompt": "x", "stream": 1}, 400, "stream", "true or false"),
    (COMPLETION, {"prompt": "x", "stream_options": {}}, 400, "stream_options", "needs stream: true"),
    (
        COMPLETION,
        {"prompt": "x", "stream": True, "stream_options": 1},
        400,
        "stream_options",
        "an object",
    ),
    (COMPLETION, {"prompt": "x", "logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    (COMPLETION, {"prompt": "x", "best_of": 2}, 400, "best_of", "does not support"),
    (COMPLETION, {"prompt": "x", "suffix": "y"}, 400, "suffix", "does not support"),
    (COMPLETION, {"prompt": "x", "temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
    (COMPLETION, {"prompt": "x", "messages": []}, 400, "messages", "unknown field 'messages'"),
    (CHAT, {}, 400, "messages", "a list of at least one message; it is missing"),
    (CHAT, {"messages": []}, 400, "messages", "a list of at least one message"),
    (CHAT, {"messages": ["hi"]}, 400, "messages[0]", "an object with role and content"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "a text or a list of parts"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", "one of system"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0].role", "it is missing"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0]",
        "reads text only",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "\udc00"}]}, 400, "messages[0].content", "surrogate"),
    (CHAT, {"messages": HI, "functions": [{}]}, 400, "functions", "does not support"),
    (CHAT, {"messages": HI, "modalities": ["audio"]}, 400, "modalities", "does not support"),
    (CHAT, {"messages": HI, "audio": {}}, 400, "audio", "leave it out$"),
    (
        CHAT,
        {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6},
        400,
        "max_completion_tokens",
        "send one of them",
    ),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs: true"),
    (CHAT, {"messages": HI, "chat_template_kwargs": 1}, 400, "chat_template_kwargs", "an object"),
    ("/v1/nowhere", {}, 404, None, "there is no path /v1/nowhere: "),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), ERRORS)
def test_errors(
    *, server: Server, path: str, body: object, status: int, param: str | None, message: str
) -> None:
    response = post(server, path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert re.search(message, error["message"]), error


def test_a_developer_message_is_a_system_message(server: Server) -> None:
    def ask(role: str) -> str:
        messages = [{"role": role, "content": "be brief"}, *HI]
        reply = post(server, CHAT, {"messages": messages, "max_tokens": 9}).json()
        return str(reply["choices"][0]["message"]["content"])

    assert ask("developer") == ask("system") != ask("user")


def test_wrong_methods(server: Server) -> None:
    response = httpx.get(f"{server.url}{CHAT}")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["message"] == f"{CHAT} does not take GET: it takes POST"
    assert httpx.post(f"{server.url}/health").status_code == 405


def test_a_huge_body_is_refused(server: Server) -> None:
    body = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'
    response = post(server, COMPLETION, body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert "more than 8388608 bytes" in response.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_accepted(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ann"}],
        "max_tokens": 2,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logprobs": None,
        "stop": None,
        "unheard_of": None,
    }
    assert post(server, CHAT, body).status_code == 200


def with_template(bundle: Path, template: str | None, *changed: str) -> None:
    """Replaces the chat template of a bundle, or removes it for None, and updates the digests of
    tokenizer_config.json and of the files `changed` in the manifest."""
    config = {} if template is None else {"chat_template": template}
    (bundle / "tokenizer_config.json").write_text(json.dumps(config))
    document = json.loads((bundle / "bundle.json").read_bytes())
    for name in ("tokenizer_config.json", *changed):
        file = toy.describe(bundle / name)
        document["files"][name] = {"blake3": file.blake3, "size": file.size}
    document["serving"]["temperature"] = 1.9
    (bundle / "bundle.json").write_text(json.dumps(document))


def test_a_template_that_refuses_and_defaults_of_the_manifest(toy_copy: Path) -> None:
    with_template(toy_copy, "{{ raise_exception('not today') }}")
    with shared.serving(toy_copy) as server:
        response = post(server, CHAT, {"messages": HI})
        assert response.status_code == 400
        assert "refuses these messages: not today" in response.json()["error"]["message"]
        asked = [{"prompt": "a", "seed": seed, "ignore_eos": True} for seed in range(3)]
        answers = [post(server, COMPLETION, body).json() for body in asked]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 3  # the temperature is not 0


def test_without_a_chat_template(toy_copy: Path) -> None:
    with_template(toy_copy, None)
    with shared.serving(toy_copy) as server:
        response = post(server, CHAT, {"messages": HI})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_chat_template"
        assert post(server, COMPLETION, {"prompt": "a"}).status_code == 200
