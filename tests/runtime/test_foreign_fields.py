"""Tests of request fields that other servers define: they are translated, accepted where they change nothing,
refused, or dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlcbuild_format.bundle import Serving
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai import api
from mlcbuild_runtime.openai.body import suggestion
from mlcbuild_runtime.openai.foreign_fields import NEUTRAL, translated, without_unknown
from mlcbuild_runtime.openai.response_format import response_format

from . import parrot, shared
from .grammars import drawn
from .parrot import say
from .shared import Server

HI: Json = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Json] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"n_predict": -1}, {}),
        ({"max_tokens": -1, "seed": -1}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"guided_regex": "[0-9]"}, {"response_format": {"type": "regex", "regex": "[0-9]"}}),
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        ({"guided_json": None, "typical_p": None}, {}),
    ],
)
def test_fields_with_an_equal(fields: dict[str, Json], expected: dict[str, Json]) -> None:
    assert translated(fields) == expected
    assert translated(expected) == expected
    api.chat_call({"messages": HI, **fields}, Serving())


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_choice": ['{"a": 1}', '{"a":2}']},
        {"guided_grammar": 'start: "{\\"a\\":" /[12]/ "}"'},
        {"structured_outputs": {"regex": r'\{"a": [12]\}', "choice": None}},
    ],
)
def test_formats_of_others(fields: dict[str, Json]) -> None:
    constraint = response_format(translated(fields)["response_format"])
    assert constraint is not None
    assert json.loads(drawn(constraint, 3)) in ({"a": 1}, {"a": 2})


@pytest.mark.parametrize("key", sorted(NEUTRAL))
def test_values_that_change_nothing(key: str) -> None:
    plain = api.chat_call({"messages": HI}, Serving())
    for value in NEUTRAL[key]:
        assert api.chat_call({"messages": HI, key: value}, Serving()) == plain
    with pytest.raises(RequestError) as caught:
        api.chat_call({"messages": HI, key: 0.25}, Serving())
    assert caught.value.param == key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_predict": 5, "max_tokens": 6}, "n_predict and max_tokens mean the same: send one of them"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json, guided_regex state several formats"),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, "response_format state several formats"),
        ({"guided_json": "{"}, "guided_json must be a JSON schema, or one in a text"),
        ({"guided_json": [1]}, "guided_json must be a JSON schema"),
        ({"guided_choice": []}, "guided_choice must be a list of 1 to 1024 texts"),
        ({"structured_outputs": {"tag": "a"}}, "structured_outputs.tag must be json, regex, choice"),
        ({"structured_outputs": 1}, "unknown field 'structured_outputs'"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of at most 16 tokens"),
        ({"min_tokens": -1}, "min_tokens must be an integer from 0"),
        ({"mirostat": True}, "mirostat is True, which this server does not support: .* or send 0$"),
        ({"typical_p": 0.5}, "typical_p is 0.5, which this server does not support: .* or send 1$"),
        ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Json], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        api.chat_call({"messages": HI, **fields}, Serving())


def test_no_suggestion_is_the_opposite() -> None:
    table = {key: api.CHAT[key] for key in api.CHAT if key != "min_tokens"}
    assert suggestion("min_tokens", table) == ""
    assert suggestion("max_token", table) == "max_tokens"
    assert suggestion("keep_alive", table) == ""


def test_what_lenience_drops() -> None:
    body: dict[str, Json] = {"messages": HI, "odd": 1, "suffix": "x", "best_of": 1, "modalities": None}
    kept, dropped = without_unknown(body, api.CHAT)
    assert (sorted(kept), dropped) == (["best_of", "messages", "modalities"], ["odd", "suffix"])
    kept, dropped = without_unknown({"messages": HI, "best_of": True}, api.CHAT)
    assert (sorted(kept), dropped) == (["messages"], ["best_of"]), "true is no number"
    api.chat_call(kept, Serving())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("foreign") / "toy"
    parrot.write(out)
    return out


@pytest.fixture(scope="module")
def lenient(bundle: Path) -> Iterator[Server]:
    with parrot.serving(bundle, "--lenient") as running:
        yield running


def ask(server: Server, text: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": say(text)}], **fields}
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, json=body, timeout=shared.WAIT, verify=shared.PLAIN)


def said(server: Server, text: str, **fields: Any) -> tuple[str, str]:
    (choice,) = ask(server, text, **fields).json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def test_ends_of_answers(lenient: Server) -> None:
    url = f"{lenient.url}/tokenize"
    document = httpx.post(url, json={"prompt": "x", "add_special_tokens": False}, verify=shared.PLAIN).json()
    (token,) = document["tokens"]
    assert said(lenient, "abxcd", stop_token_ids=[token]) == ("ab", "stop")
    longer, finish = said(lenient, "ab", min_tokens=6, max_tokens=6)
    assert (len(longer), longer[:2], finish) == (6, "ab", "length")
    refused = ask(lenient, "ab", min_tokens=6, guided_regex="a")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


def test_a_lenient_server_drops_and_logs(lenient: Server) -> None:
    assert said(lenient, "ab", odd=1, keep_alive="5m", verbosity="high") == ("ab", "stop")
    assert ask(lenient, "ab", temperature="hot").status_code == 400
