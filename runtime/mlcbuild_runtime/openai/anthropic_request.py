"""Requests of Anthropic's /v1/messages: converts their blocks and fields to those of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe

from mlcbuild_runtime.openai import api, tools
from mlcbuild_runtime.openai.body import Field, RequestBody, Table, ignored, integer, number, wrong

_BLOCK: Json = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
_CONTENT: dict[str, Json] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
_MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _CONTENT},
}
_TOOL: Json = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {"name": {"type": "string"}, "input_schema": {"type": "object"}},
}
_CHOICE: dict[str, Json] = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["auto", "any", "tool", "none"]}, "name": {"type": "string"}},
}
_THINKING: dict[str, Json] = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}},
}
_OUTPUT: dict[str, Json] = {
    "type": "object",
    "properties": {
        "effort": {"enum": ["low", "medium", "high", "xhigh", "max", None]},
        "format": {
            "anyOf": [
                {
                    "type": "object",
                    "required": ["type", "schema"],
                    "properties": {"type": {"enum": ["json_schema"]}, "schema": {"type": "object"}},
                },
                {"type": "null"},
            ]
        },
    },
}
COUNT: Table = {
    "model": api.COMMON["model"],
    "messages": Field({"type": "array", "minItems": 1, "items": _MESSAGE}, "The chat so far."),
    "system": Field(_CONTENT, "A system message."),
    "tools": Field({"type": "array", "maxItems": tools.MAX_TOOLS, "items": _TOOL}, "Functions to call."),
    "tool_choice": Field(_CHOICE, "Only with `tools`."),
    "thinking": Field(_THINKING, "Whether the model reasons first; `budget_tokens` is ignored."),
    "output_config": Field(
        _OUTPUT, "`format` is a JSON schema of the answer; `effort` is `reasoning_effort` of chats."
    ),
    **ignored("cache_control"),
}
TABLE: Table = {
    **COUNT,
    "max_tokens": integer(1),
    "temperature": number(0, 2),
    "top_p": api.SAMPLING["top_p"],
    "top_k": api.SAMPLING["top_k"],
    "stop_sequences": Field(
        {"type": "array", "items": {"type": "string"}}, "Texts that end the answer, like `stop` of chats."
    ),
    "stream": api.COMMON["stream"],
    **ignored("metadata", "service_tier"),
}
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")


def chat_body(body: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the body of a chat completion that means the same as a body of Anthropic's /v1/messages. Raises
    RequestError, naming the field, for an invalid one, or if `max_tokens` is missing."""
    fields = RequestBody(body, TABLE)
    if fields.integer("max_tokens") is None:
        raise wrong("max_tokens", "an integer of at least 1", None)
    return _chat(fields) | {key: fields.get(key) for key in _SAME} | {"stop": fields.get("stop_sequences")}


def counted_body(body: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the body of a chat completion with the same prompt as a body of Anthropic's endpoint
    /v1/messages/count_tokens. Raises RequestError for an invalid field, naming it."""
    return _chat(RequestBody(body, COUNT))


def _chat(fields: RequestBody) -> dict[str, Json]:
    """Returns what a request of Anthropic's API states about messages, tools, thinking and the answer's
    format, as fields of a chat completion; sampling parameters and limits are left out. Raises RequestError
    for an invalid field."""
    messages: list[Json] = []
    if (system := fields.get("system")) is not None:
        messages.append({"role": "system", "content": _text("system", system)})
    listed = fields.get("messages")
    if not isinstance(listed, list) or not listed:
        raise wrong("messages", "a list of at least one message", listed)
    for i, message in enumerate(listed):
        messages += _messages(f"messages[{i}]", message)
    chat: dict[str, Json] = {"messages": messages, "tools": _tools(fields.get("tools"))}
    match fields.get("tool_choice"):
        case None:
            pass
        case {"type": "auto" | "any" | "none" as kind, **more}:
            chat["tool_choice"] = "required" if kind == "any" else kind
            chat["parallel_tool_calls"] = more.get("disable_parallel_tool_use") is not True
        case {"type": "tool", "name": str(name)}:
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        case other:
            raise wrong("tool_choice", '{"type": "auto"}, "any", "none", or "tool" with its name', other)
    match fields.get("thinking"):
        case None:
            pass
        case {"type": "enabled" | "adaptive" | "disabled" as kind}:
            chat["enable_thinking"] = kind != "disabled"
        case other:
            raise wrong("thinking", '{"type": "enabled"}, "adaptive" or "disabled"', other)
    return chat | _output(fields.object("output_config"))


def _output(config: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the field `output_config` of Anthropic's API as fields of a chat completion: `effort` becomes
    `reasoning_effort`, "xhigh" for "max", and `format` becomes `response_format`; absent ones are left out.
    Raises RequestError for a format that is not {"type": "json_schema", "schema": an object}."""
    chat: dict[str, Json] = {}
    if (effort := config.get("effort")) is not None:
        chat["reasoning_effort"] = "xhigh" if effort == "max" else effort
    match config.get("format"):
        case None:
            pass
        case {"type": "json_schema", "schema": dict(schema)}:
            chat["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            }
        case other:
            raise wrong("output_config.format", '{"type": "json_schema", "schema": {...}}', other)
    return chat


def _messages(where: str, message: Json) -> list[Json]:
    """Returns a message of Anthropic's API as OpenAI chat messages: one for each tool result in it, then one
    with its text, reasoning and tool calls, which is left out if the message has tool results and no text.
    Texts of several blocks are joined without a separator. where: the message's place, for errors. Raises
    RequestError for an invalid message, or a block of a kind that its role cannot hold, such as an image."""
    match message:
        case {"role": "user" | "assistant" as role, "content": str() | list() as content}:
            blocks: list[Json] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        case _:
            raise wrong(where, 'an object with the role "user" or "assistant" and content', message)
    results, calls, text, thought = list[Json](), list[Json](), "", ""
    for i, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(words)}:
                text += words
            case {"type": "thinking", "thinking": str(words)} if role == "assistant":
                thought += words
            case {"type": "redacted_thinking"} if role == "assistant":
                pass
            case {"type": "tool_use", "id": id, "name": name, "input": arguments} if role == "assistant":
                called: Json = {"name": name, "arguments": json.dumps(arguments)}
                calls.append({"id": id, "type": "function", "function": called})
            case {"type": "tool_result", "tool_use_id": id} if role == "user" and isinstance(block, dict):
                result = _text(f"{where}.content[{i}].content", block.get("content") or "")
                results.append({"role": "tool", "tool_call_id": id, "content": result})
            case _:
                kind = block.get("type") if isinstance(block, dict) else block
                raise RequestError(
                    f"{where}.content[{i}] is of type {describe(kind)}, which a message of the {role} cannot"
                    " hold here: this server accepts text, thinking, tool_use and tool_result",
                    param=f"{where}.content[{i}]",
                    code="unsupported_block",
                )
    converted: dict[str, Json] = {"role": role, "content": text}
    if thought:
        converted["reasoning_content"] = thought
    if calls:
        converted["tool_calls"] = calls
    return results if results and not text else [*results, converted]


def _text(where: str, content: Json) -> str:
    """Returns the text of a message's content, which is a string or a list of text blocks, whose texts are
    joined without a separator. where: the content's place, for errors. Raises RequestError for any other
    content."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    texts = [block.get("text") if isinstance(block, dict) else None for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        raise wrong(where, 'a text or a list of blocks such as {"type": "text", "text": "..."}', content)
    return "".join(map(str, texts))


def _tools(value: Json) -> Json:
    if not isinstance(value, list):
        return value
    listed: list[Json] = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"tools[{i}] is {describe(tool)}: this server has only tools with a name and an input_schema",
                param=f"tools[{i}]",
                code="unsupported_tool",
            )
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        listed.append({"type": "function", "function": function})
    return listed
