"""Tests of tools: which tools a request may state, and tool calls in the answers of real servers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai import api
from mlcbuild_runtime.openai.body import RequestBody
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.response_format import schema_constraint
from mlcbuild_runtime.openai.tools import Toolbox, constraint, in_words, numbered, toolbox

from tests.runtime.tool_forms import ADD, FORMS, HERMES, NATIVE, NOW, PLAIN, SCHEMA, pieces, tool

from . import shared
from .grammars import GRAMMARS, SIZE, TOKENIZERS, allowed_by, drawn
from .shared import Server
from .test_server import HI, post, with_template


def shown(form: Form) -> dict[int, str]:
    return {token: name for name, token in form.tokens.items()}


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    parallel=st.booleans(),
    seed=st.integers(0, 10_000),
    message=st.booleans(),
)
def test_every_forced_answer_is_calls(form: str, parallel: bool, seed: int, message: bool) -> None:
    box = Toolbox((ADD, NOW), "required", parallel)
    text = drawn(constraint(box, FORMS[form], message), seed, "tools", message, shown(FORMS[form]))
    parts = pieces(text, FORMS[form], "required", seed)
    assert [piece.kind for piece in parts] == ["call", "arguments"] * (len(parts) // 2)
    assert len(parts) == 2 or parallel
    for call, arguments in zip(parts[::2], parts[1::2], strict=True):
        (tool,) = (tool for tool in box.tools if tool.name == call.text)
        jsonschema.validate(json.loads(arguments.text), tool.parameters)


ANSWER: dict[str, Json] = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "of a call"]}, "arguments": {"type": "null"}},
    "required": ["name"],
    "additionalProperties": False,
}
"""A JSON schema whose answers begin like a tool call."""


@settings(max_examples=80, deadline=None)
@given(form=st.sampled_from(sorted(FORMS)), seed=st.integers(0, 10_000))
def test_every_answer_is_calls_or_has_its_format(form: str, seed: int) -> None:
    box, expected = Toolbox((ADD,), "auto", False), schema_constraint(ANSWER, "response_format")
    text = drawn(constraint(box, FORMS[form], False, expected), seed, "tools", False, shown(FORMS[form]))
    first, *others = pieces(text, FORMS[form], "auto", seed, formatted=True)
    if first.kind == "call":
        (arguments,) = others
        jsonschema.validate(json.loads(arguments.text), SCHEMA)
    else:
        assert not others
        jsonschema.validate(json.loads(first.text), ANSWER)


def test_a_special_token_is_no_text() -> None:
    """Checks that a forced call begins with the special token that the syntax requires, and not with ordinary
    text that spells its name."""
    compiled = GRAMMARS["tools"].compiled(
        constraint(Toolbox((ADD,), "required", False), FORMS["mistral"], False), False
    )
    (first,) = allowed_by(compiled.matcher()).nonzero()[0].tolist()
    assert first == FORMS["mistral"].tokens["[TOOL_CALLS]"]


def test_a_free_answer_may_be_text_or_calls() -> None:
    for form in (HERMES, PLAIN):
        expected = constraint(Toolbox((ADD,), "auto", True), form, space=False)
        vocabulary = TOKENIZERS["json"].vocabulary
        letters = {vocabulary.token_bytes(token): token for token in range(SIZE - 1, 6, -1)}
        for text in ("Hello, you {there}", form.write("add", {"a": 5, "b": "x"})):
            matcher = GRAMMARS["json"].compiled(expected, message=False).matcher()
            for byte in text.encode():
                matcher.take(letters[bytes([byte])])
            assert allowed_by(matcher)[sorted(TOKENIZERS["json"].eos)].all(), text
        matcher = GRAMMARS["json"].compiled(expected, message=False).matcher()
        for byte in (form.mark + '{"name": "').encode():
            matcher.take(letters[bytes([byte])])
        allowed = {vocabulary.token_bytes(int(token))[:1] for token in allowed_by(matcher).nonzero()[0]}
        assert allowed == {b"a"}


def allowed(mode: str, *names: str) -> Json:
    listed: list[Json] = [tool(name=name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"tool_choice": "required"},
            "tool_choice",
            "tool_choice is 'required', which requires tools, and the request has none: send tools, or",
        ),
        ({"tools": {}}, "tools", "a list of at most 128 tools"),
        ({"tools": [tool()] * 129}, "tools", "a list of at most 128 tools"),
        ({"tools": [{}]}, "tools[0]", "an object such as"),
        ({"tools": [{"type": "code", "function": {}}]}, "tools[0]", "an object such as"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool(name="")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description", "a text"),
        ({"tools": [tool(parameters=[1])]}, "tools[0].function.parameters", "a JSON schema of an object"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters", "of an object"),
        ({"tools": [tool(), tool()]}, "tools", "different names"),
        ({"tools": [tool()], "tool_choice": "must"}, "tool_choice", '"none", "auto", "required", '),
        ({"tools": [tool()], "tool_choice": tool(name="g")}, "tool_choice", "with the name of a tool"),
        ({"tools": [tool()], "tool_choice": allowed("any", "f")}, "tool_choice", '"mode": "auto", "tools"'),
        (
            {"tools": [tool()], "tool_choice": allowed("auto", "f", "g")},
            "tool_choice.allowed_tools.tools[1]",
            "must be a tool of `tools`",
        ),
        (
            {"tools": [tool()], "tool_choice": allowed("auto")},
            "tool_choice.allowed_tools.tools",
            "a list of at least one tool",
        ),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ],
)
def test_tools_that_cannot_be(fields: dict[str, Json], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        toolbox(RequestBody(fields, api.CHAT))
    assert caught.value.param == param


def test_no_tools() -> None:
    bodies: list[dict[str, Json]] = [{}, {"tools": []}, {"tools": [tool()], "tool_choice": "none"}]
    for fields in bodies:
        assert toolbox(RequestBody(fields, api.CHAT)) is None


def test_calls_and_results_in_words() -> None:
    call: Json = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Json]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "tool", "content": "3", "tool_call_id": "unknown"},
    ]
    actual = in_words(messages, Toolbox((NOW,), "auto", True), PLAIN)
    assert str(actual[0]["content"]).startswith("Be brief.\n\nTools:\n")
    assert [message["content"] for message in actual[1:]] == [
        "?",
        '{"name": "add", "arguments": {"a": 1}}',
        "Result of add: 2",
        "Result of the tool: 3",
    ]
    assert in_words(messages[1:2], Toolbox((NOW,), "auto", True), PLAIN)[0]["role"] == "system"


def test_calls_that_the_model_numbers_have_its_ids() -> None:
    """Checks Kimi K2's ids, which number the calls of the whole chat, and that results name them; a later
    call may have the client's id of an earlier one."""

    def call(id: str | None, name: str) -> Json:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}

    def result(id: str) -> dict[str, Json]:
        return {"role": "tool", "content": "2", "tool_call_id": id}

    messages: list[dict[str, Json]] = [
        {"role": "assistant", "content": "", "tool_calls": [call("a", "now"), call(None, "add")]},
        *(result("a"), result("b")),
        {"role": "assistant", "content": "", "tool_calls": [call("a", "add")]},
        result("a"),
    ]
    first, result_of_first, unknown, later, result_of_later = numbered(messages, FORMS["kimi"])
    assert first["tool_calls"] == [call("functions.now:0", "now"), call("functions.add:1", "add")]
    assert later["tool_calls"] == [call("functions.add:2", "add")]
    ids = [each["tool_call_id"] for each in (result_of_first, unknown, result_of_later)]
    assert ids == ["functions.now:0", "b", "functions.add:2"]
    assert numbered(messages, HERMES) == messages


@pytest.fixture(scope="module")
def native_server(toy_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yields a server of the toy model whose chat template supports tools."""
    copy = Path(shutil.copytree(toy_bundle, tmp_path_factory.mktemp("native") / "toy"))
    with_template(copy, NATIVE)
    with shared.serving(copy) as running:
        yield running


MISTRAL = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %} [TOOL_CALLS]"


def test_calls_that_begin_with_a_special_token(toy_copy: Path) -> None:
    """Checks that tool calls which begin with a special token are parsed in complete and in streamed answers,
    of chats and of responses."""
    path = toy_copy / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user|>", "[TOOL_CALLS]"))
    with_template(toy_copy, MISTRAL, "tokenizer.json")
    with shared.serving(toy_copy) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            options: Any = {"model": server.name, "temperature": 1.5, "seed": 3, "tool_choice": "required"}
            asked = {**options, "messages": HI, "tools": TOOLS[:1], "parallel_tool_calls": False}
            (choice,) = client.chat.completions.create(**asked).choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            check(choice.message.tool_calls, "[0-9a-f]{9}")
            arguments = ""
            for chunk in client.chat.completions.create(**asked, stream=True):
                assert not chunk.choices[0].delta.content
                for call in chunk.choices[0].delta.tool_calls or []:
                    assert call.function is not None
                    arguments += call.function.arguments or ""
            (created,) = choice.message.tool_calls or []
            assert created.type == "function" and arguments == created.function.arguments
            flat: Any = [{"type": "function", **TOOLS[0]["function"]}]
            del options["seed"]
            (item,) = client.responses.create(**options, input="hi", tools=flat).output[:1]
            assert item.type == "function_call"
            jsonschema.validate(json.loads(item.arguments), SCHEMA)


TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


def check(calls: Any, name: str = "call_.*") -> None:
    assert calls
    for call in calls:
        assert call.type == "function" and re.fullmatch(name, call.id)
        if call.function.name == "add":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        else:
            assert call.function.name == "now"
            json.loads(call.function.arguments)


def test_forced_calls_whole_and_streamed(native_server: Server) -> None:
    url = f"{native_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for seed in range(6):
            options: Any = {
                "model": native_server.name,
                "messages": HI,
                "tools": TOOLS[:1],
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "seed": seed,
                "temperature": 1.5,
            }
            whole = client.chat.completions.create(**options).choices[0]
            assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
            check(whole.message.tool_calls)
            name, arguments, finish = "", "", None
            for chunk in client.chat.completions.create(**options, stream=True):
                for call in chunk.choices[0].delta.tool_calls or []:
                    assert call.index == 0 and call.function is not None
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
                finish = chunk.choices[0].finish_reason or finish
                assert not chunk.choices[0].delta.content
            assert (name, finish) == ("add", "tool_calls")
            (created,) = whole.message.tool_calls or []
            assert created.type == "function" and arguments == created.function.arguments


def test_allowed_tools(native_server: Server) -> None:
    """Checks that `allowed_tools` restricts the calls to these tools, while the prompt still describes all
    tools."""
    body = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False, "temperature": 1.5}
    used = set()
    for seed in range(4):
        document = post(
            native_server, CHAT, {**body, "seed": seed, "tool_choice": allowed("required", "now")}
        ).json()
        (call,) = document["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "now"
        used.add(document["usage"]["prompt_tokens"])
    free = {**body, "max_tokens": 1, "tool_choice": allowed("auto", "now", "now")}
    used.add(post(native_server, CHAT, free).json()["usage"]["prompt_tokens"])
    used.add(post(native_server, CHAT, {**body, "max_tokens": 1}).json()["usage"]["prompt_tokens"])
    assert len(used) == 1


def test_a_named_tool_without_a_template_that_knows_tools(server: Server) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": dict(NOW.parameters)}}]
    body = {"messages": HI, "tools": tools, "tool_choice": named}
    (choice,) = post(server, "/v1/chat/completions", body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "now" and json.loads(call["function"]["arguments"]) == {}
    assert set(call) == {"id", "type", "function"}
    # The answer goes back, with the result.
    more = [*HI, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "noon"}]
    again = post(server, "/v1/chat/completions", {"messages": more, "max_tokens": 2})
    assert again.status_code == 200, again.text


def test_a_free_choice_gives_text_or_calls(native_server: Server) -> None:
    body = {"messages": HI, "tools": TOOLS, "max_tokens": 20, "temperature": 1}
    (choice,) = post(native_server, "/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    tokens = post(native_server, "/tokenize", {"messages": HI}).json()["count"]
    used = post(native_server, "/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    assert used == tokens + len("add now ")


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_formats_over_http(server: Server, path: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": -9, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    asked: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "x"}
    body = {**asked, "response_format": form, "max_tokens": 100, "n": 3, "temperature": 1.9, "seed": 1}
    for choice in post(server, path, body).json()["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), schema)
    regex = post(server, path, {**asked, "response_format": {"type": "regex", "regex": "[0-9]{4}"}}).json()
    assert regex["usage"]["completion_tokens"] == 4
    wrong = post(server, path, {**asked, "response_format": {"type": "regex", "regex": "["}})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["code"] == "invalid_constraint"
    assert post(server, path, {**asked, "response_format": {"type": "text"}}).status_code == 200


def test_tools_and_a_format(native_server: Server) -> None:
    """Checks that an answer to a request with tools and a JSON format is either a call or in that format, and
    that tools cannot be combined with a grammar."""
    json_schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    body = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False, "temperature": 1.5}
    for (first, other), finish in (("{<", "stop"), ("<{", "tool_calls")):  # <tool_call>
        bias = {str(ord(first) - ord("!")): 100, str(ord(other) - ord("!")): -100}
        inputs = {**body, "logit_bias": bias, "response_format": json_schema}
        (choice,) = post(native_server, CHAT, inputs).json()["choices"]
        assert choice["finish_reason"] == finish
        if finish == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), ANSWER)
        else:
            assert choice["message"]["content"] is None
    grammar = {"type": "grammar", "grammar": 'start: "yes"'}
    response = post(native_server, CHAT, {**body, "response_format": grammar})
    assert response.status_code == 400
    assert "cannot be combined" in response.json()["error"]["message"]


def test_calls_that_are_none(server: Server) -> None:
    wrong: list[Any] = [[{}], [{"function": {"name": "f", "arguments": "{"}}], 1]
    for calls in wrong:
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        response = post(server, CHAT, {"messages": [*HI, message]})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("messages[1].tool_calls")
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
