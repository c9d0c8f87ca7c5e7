"""Tests of Anthropic's endpoint /v1/messages: bodies become chats, answers become content blocks, and
Anthropic's client understands them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai.anthropic_request import chat_body, counted_body
from mlcbuild_runtime.openai.anthropic_stream import error_document

from . import parrot, shared
from .parrot import say
from .shared import Server
from .test_clients import run
from .test_reasoning import TEMPLATE
from .tool_forms import HERMES, SCHEMA

HI: Json = [{"role": "user", "content": "hi"}]
TOOL_FIELDS: dict[str, Json] = {"name": "add", "description": "Adds", "input_schema": SCHEMA}
TOOL: Json = TOOL_FIELDS


def test_blocks_become_messages() -> None:
    messages: Json = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "b", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": True}]},
    ]
    body: dict[str, Json] = {"max_tokens": 5, "messages": messages, "system": [{"type": "text", "text": "s"}]}
    body |= {"tools": [TOOL], "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    chat = chat_body(body)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert chat["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "c", "reasoning_content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "user", "content": "d"},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)
    assert (chat["stop"], chat["enable_thinking"], chat["max_tokens"]) == (["x"], True, 5)
    assert "max_tokens" not in counted_body({"messages": HI})


def test_an_output_format_binds_the_answer() -> None:
    config: Json = {"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}}
    chat = chat_body({"max_tokens": 5, "messages": HI, "output_config": config})
    expected = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert (chat["response_format"], chat["reasoning_effort"]) == (expected, "xhigh")
    empty: Json = {"effort": None, "format": None}
    assert "response_format" not in chat_body({"max_tokens": 5, "messages": HI, "output_config": empty})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": None}, "max_tokens", "an integer of at least 1"),
        ({"messages": []}, "messages", "a list of at least one message"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0]", 'role "user" or "assistant"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
            "this server accepts text, thinking, tool_use and tool_result",
        ),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]", "is of type 7"),
        ({"system": [1]}, "system", "a text or a list of blocks"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]", "a name and an input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice", 'or "tool" with its name'),
        ({"thinking": {"type": "much"}}, "thinking", '"adaptive" or "disabled"'),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format", '"json_schema", "schema"'),
        ({"stop": ["a"]}, "stop", "unknown field 'stop'"),
    ],
)
def test_bodies_that_are_refused(fields: dict[str, Json], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        chat_body({"max_tokens": 1, "messages": HI, **fields})
    assert caught.value.param == param


def test_a_tool_may_state_no_type() -> None:
    types: list[dict[str, Json]] = [{}, {"type": None}, {"type": "custom"}]
    for stated in types:
        chat = chat_body({"max_tokens": 1, "messages": HI, "tools": [{**TOOL_FIELDS, **stated}]})
        assert isinstance(chat["tools"], list) and len(chat["tools"]) == 1


def test_errors_have_their_kinds() -> None:
    for status, kind in (
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (422, "invalid_request_error"),
    ):
        assert error_document(RequestError("no", status=status))["error"] == {"type": kind, "message": "no"}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundle = tmp_path_factory.mktemp("anthropic") / "toy"
    parrot.write(bundle, TEMPLATE)
    with parrot.serving(bundle, "--api-key", "secret") as running:
        yield running


def post(server: Server, path: str, key: str = "secret", **body: Any) -> httpx.Response:
    headers = {"x-api-key": key}
    url = f"{server.url}/v1/{path}"
    return httpx.post(url, json=body, headers=headers, timeout=shared.WAIT, verify=shared.PLAIN)


def test_over_http(thinker: Server) -> None:
    text = "<think>\nHm.\n</think>\n\nFour. " + HERMES.write("add", {"a": 1, "b": "x"})
    messages = [{"role": "user", "content": say(text)}]
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 400, "tools": [TOOL]}
    document = post(thinker, "messages", **asked).json()
    thought, words, call = document["content"]
    assert (thought["thinking"], words["text"], call["input"]) == ("Hm.", "Four. ", {"a": 1, "b": "x"})
    assert (document["stop_reason"], call["name"], document["role"]) == ("tool_use", "add", "assistant")
    usage = document["usage"]
    count = post(thinker, "messages/count_tokens", messages=asked["messages"], tools=[TOOL]).json()
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    lines = post(thinker, "messages", stream=True, **asked).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    cut = post(thinker, "messages", **{**asked, "max_tokens": 12}).json()
    assert (cut["stop_reason"], cut["content"][0]["type"]) == ("max_tokens", "thinking")
    refused = post(thinker, "messages", messages=asked["messages"])
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert post(thinker, "messages", key="wrong", **asked).status_code == 401


CLIENT = """
import json, sys
import anthropic

url, model, said = sys.argv[1:]
tool = json.loads('TOOL')
with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
    asked = {"model": model, "max_tokens": 400, "messages": [{"role": "user", "content": said}]}
    found = client.messages.create(**asked, tools=[tool])
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use"], found
    assert found.content[0].thinking == "Hm." and found.stop_reason == "tool_use"
    with client.messages.stream(**asked, tools=[tool]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"text", "thinking", "input_json"} <= kinds, kinds
    assert [b.model_dump(exclude={"id"}) for b in final.content] == [
        b.model_dump(exclude={"id"}) for b in found.content
    ], final
    assert final.usage.output_tokens == found.usage.output_tokens
    result = {"type": "tool_result", "tool_use_id": found.content[2].id, "content": "5"}
    more = [*asked["messages"], {"role": "assistant", "content": found.content}]
    more += [{"role": "user", "content": [result, {"type": "text", "text": said}]}]
    assert client.messages.create(**{**asked, "messages": more}, tools=[tool]).content[0].thinking == "Hm."
    assert client.messages.count_tokens(model=model, messages=more).input_tokens > 100
    try:
        client.messages.create(**{**asked, "messages": []})
    except anthropic.BadRequestError as error:
        assert "at least one message" in str(error)
    else:
        raise AssertionError
    assert client.models.list().data[0].id == model
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    bound = client.messages.create(**asked, output_config=config).content[-1]
    assert json.loads(bound.text) == {"n": 7}, bound
"""


def test_its_own_client(thinker: Server) -> None:
    text = "<think>\nHm.\n</think>\n\nFour. " + HERMES.write("add", {"a": 1, "b": "x"})
    program = CLIENT.replace("TOOL", json.dumps(TOOL).replace("\\", "\\\\"))
    run("anthropic", "-c", program, thinker.url, thinker.name, say(text))
