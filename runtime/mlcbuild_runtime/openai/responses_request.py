"""/v1/responses, the request: its items become a chat, and its fields those of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe

from mlcbuild_runtime.openai import api, response_format, tools
from mlcbuild_runtime.openai.body import Body, Field, Table, boolean, ignored, integer, neutral, text, wrong

Item = dict[str, Json]
"""Something that was said, called or returned, as OpenAI's clients send it and get it."""

_PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": {"type": "string"}},
}
_TEXT: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_ITEM: Json = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "type": {"const": "message"},
                "role": {"enum": ["user", "system", "developer", "assistant"]},
                "content": _TEXT,
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "name", "arguments"],
            "properties": {
                "type": {"const": "function_call"},
                "call_id": {"type": "string"},
                "name": {"type": "string"},
                "arguments": {"type": "string", "contentMediaType": "application/json"},
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "output"],
            "properties": {
                "type": {"const": "function_call_output"},
                "call_id": {"type": "string"},
                "output": _TEXT,
            },
        },
        {"type": "object", "required": ["type"], "properties": {"type": {"const": "reasoning"}}},
    ]
}
_FORMAT: Json = {
    "anyOf": [
        {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
        {
            "type": "object",
            "required": ["type", "schema"],
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
        },
        response_format.text_kind("regex"),
        response_format.text_kind("grammar"),
    ]
}
_TOOL: Json = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, **tools.FUNCTION},
}
_NAMED: dict[str, Json] = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
}
_CHOICE: dict[str, Json] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _NAMED,
        {
            "type": "object",
            "required": ["type", "mode", "tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "items": _NAMED},
            },
        },
    ]
}
MAX_METADATA = 16
_PASSED = (*api.SAMPLING, "stop", "ignore_eos", "priority", "parallel_tool_calls", "model", "stream")
"""Fields that mean the same in a chat."""

TABLE: Table = {
    "input": Field({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM}]}, "A text, or items."),
    **{key: api.CHAT[key] for key in _PASSED},
    "instructions": text("Goes first, as a system message; not kept for later responses."),
    "max_output_tokens": integer(1),
    "text": Field({"type": "object", "properties": {"format": _FORMAT}}, "What the text must be."),
    "tools": Field({"type": "array", "maxItems": tools.MAX_TOOLS, "items": _TOOL}, "Functions to call."),
    "tool_choice": Field(_CHOICE, "Only with `tools`."),
    "previous_response_id": text("A stored response that this one goes on from."),
    "store": boolean("Keep the response, for `previous_response_id` and GET (default: true)."),
    "metadata": Field({"type": "object"}, "Given back with the response."),
    "chat_template_kwargs": api.CHAT["chat_template_kwargs"],
    **ignored("include", "reasoning", "stream_options", "user", "safety_identifier", "service_tier"),
    **ignored("prompt_cache_key", "prompt_cache_retention"),
    **neutral(background=(False,), conversation=(), max_tool_calls=(), prompt=(), top_logprobs=(0,)),
    **neutral(truncation=("disabled",)),
}


@dataclass(frozen=True)
class Call:
    """A checked body."""

    items: tuple[Item, ...]
    """Of `input`; those of earlier responses are not among them."""
    chat: Mapping[str, Json]
    """Fields of a chat, without its messages."""
    instructions: str | None
    previous: str | None
    store: bool
    shown: Mapping[str, Json]
    """What the response repeats of its request."""

    def body(self, before: Sequence[Item]) -> dict[str, Json]:
        """The body of a chat that goes on after the items `before`. Raises RequestError."""
        found = _messages([*before, *self.items])
        if self.instructions is not None:
            found.insert(0, {"role": "system", "content": self.instructions})
        return {**self.chat, "messages": list(found)}


def call(body: Mapping[str, Json]) -> Call:
    """A body of /v1/responses. Raises RequestError, naming the field."""
    fields = Body(body, TABLE)
    chat: dict[str, Json] = {key: fields.get(key) for key in (*_PASSED, "chat_template_kwargs")}
    chat["max_tokens"] = fields.integer("max_output_tokens")
    wanted_form = fields.object("text").get("format")
    chat["response_format"] = _format(wanted_form)
    listed, choice = fields.get("tools"), fields.get("tool_choice")
    chat["tools"], chat["tool_choice"] = _tools(listed), _choice(choice)
    shown: dict[str, Json] = {
        "instructions": fields.text("instructions"),
        "max_output_tokens": fields.integer("max_output_tokens"),
        "metadata": _metadata(fields.object("metadata")),
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", default=True),
        "previous_response_id": fields.text("previous_response_id"),
        "store": fields.boolean("store", default=True),
        "text": {"format": wanted_form or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": listed or [],
    }
    return Call(
        items=_items(fields.get("input")),
        chat=chat,
        instructions=fields.text("instructions"),
        previous=fields.text("previous_response_id"),
        store=fields.boolean("store", default=True),
        shown=shown,
    )


def _metadata(found: dict[str, Json]) -> Json:
    if len(found) > MAX_METADATA or not all(
        isinstance(value, str) and len(key) <= 64 and len(value) <= 512 for key, value in found.items()
    ):
        limits = f"at most {MAX_METADATA} texts of up to 512 characters, with keys of up to 64"
        raise wrong("metadata", f"an object of {limits}", found)
    return found


def _items(found: Json) -> tuple[Item, ...]:
    if isinstance(found, str):
        return ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": found}]},)
    if not isinstance(found, list) or not found:
        raise wrong("input", "a text, or a list of at least one item", found)
    items = []
    for i, item in enumerate(found):
        if not isinstance(item, dict):
            raise wrong(f"input[{i}]", "an object", item)
        items.append(item)
    _messages(items)
    return tuple(items)


def _messages(items: Sequence[Item]) -> list[dict[str, Json]]:
    """Items as messages of a chat: calls that follow each other belong to one message."""
    found: list[dict[str, Json]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "message":
            content = _content(f"{where}.content", item.get("content"))
            found.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            call: Json = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            calls = found[-1].setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append(call)
        elif kind == "function_call_output":
            output = _content(f"{where}.output", item.get("output"))
            found.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
        elif kind != "reasoning":
            raise RequestError(
                f"{where} is of type {describe(kind)}: this server takes message, function_call,"
                " function_call_output and reasoning (which it ignores)",
                param=where,
                code="unsupported_item",
            )
    return found


def _content(where: str, content: Json) -> Json:
    """A text, or parts, in a chat's words."""
    if not isinstance(content, list):
        return content
    parts: list[Json] = []
    for i, part in enumerate(content):
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(words)}:
                parts.append({"type": "text", "text": words})
            case {"type": "refusal", "refusal": str(words)}:
                parts.append({"type": "text", "text": words})
            case _:
                form = '{"type": "input_text", "text": "..."}'
                raise wrong(f"{where}[{i}]", f"a part such as {form}: this model reads text only", part)
    return parts


def _format(found: Json) -> Json:
    match found:
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        case {"type": "json_schema"}:
            raise wrong("text.format", '{"type": "json_schema", "name": "...", "schema": {...}}', found)
    return found


def _tools(found: Json) -> Json:
    if not isinstance(found, list):
        return found
    listed: list[Json] = []
    for i, tool in enumerate(found):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise RequestError(
                f"tools[{i}] is of type {describe(kind)}: this server has only functions",
                param=f"tools[{i}]",
                code="unsupported_tool",
            )
        listed.append({"type": "function", "function": tool})
    return listed


def _choice(found: Json) -> Json:
    match found:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(listed)}:
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [_choice(tool) for tool in listed]},
            }
    return found
