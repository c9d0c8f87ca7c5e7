"""Checks requests of /v1/responses, and converts their items and fields to those of a chat completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe

from mlcbuild_runtime.openai import api, response_format, tools
from mlcbuild_runtime.openai.body import (
    Field,
    RequestBody,
    Table,
    boolean,
    ignored,
    integer,
    neutral,
    text,
    wrong,
)
from mlcbuild_runtime.openai.reasoning import EFFORTS

Item = dict[str, Json]
"""An item of a /v1/responses conversation as a JSON object: a message, reasoning, a tool call or a tool's
result, in the form that OpenAI's clients send and receive."""

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
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"const": "reasoning"},
                "summary": {"type": "array"},
                "content": {"type": ["array", "null"]},
            },
        },
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
_REASONING: dict[str, Json] = {
    "type": "object",
    "properties": {"effort": {"enum": [*EFFORTS, None]}, "summary": {"type": ["string", "null"]}},
}
MAX_METADATA = 16
_PASSED = (*api.SAMPLING, "stop", "ignore_eos", "priority", "parallel_tool_calls", "model", "stream")
"""Fields of /v1/responses that have the same name and meaning in a request for a chat completion."""

TABLE: Table = {
    "input": Field({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM}]}, "A text, or items."),
    **{key: api.CHAT[key] for key in _PASSED},
    "instructions": text("A system message that precedes the input; it is not stored for later responses."),
    "max_output_tokens": integer(1),
    "text": Field(
        {"type": "object", "properties": {"format": _FORMAT}}, "The format that the text must have."
    ),
    "tools": Field({"type": "array", "maxItems": tools.MAX_TOOLS, "items": _TOOL}, "Functions to call."),
    "tool_choice": Field(_CHOICE, "Only with `tools`."),
    "previous_response_id": text("The id of a stored response that this one continues."),
    "store": boolean("Whether the response is stored, for `previous_response_id` and GET (default: true)."),
    "metadata": Field({"type": "object"}, "Texts that are returned with the response."),
    "chat_template_kwargs": api.CHAT["chat_template_kwargs"],
    "enable_thinking": api.CHAT["enable_thinking"],
    "reasoning": Field(_REASONING, "`effort`, as `reasoning_effort` of chats; other fields are ignored."),
    **ignored("include", "stream_options", "user", "safety_identifier", "service_tier"),
    **ignored("prompt_cache_key", "prompt_cache_retention"),
    **neutral(background=(False,), conversation=(), max_tool_calls=(), prompt=(), top_logprobs=(0,)),
    **neutral(truncation=("disabled",)),
}


@dataclass(frozen=True)
class ResponsesCall:
    """The checked fields of one request to /v1/responses: its new items, the fields of an equivalent chat
    completions request, and the fields that the response repeats."""

    items: tuple[Item, ...]
    """The items (messages, reasoning, tool calls, tool results) of the request's field `input`, without those
    of earlier responses that the request continues."""
    chat: Mapping[str, Json]
    """The fields, without the messages, of the chat completions request that means the same as this request
    to /v1/responses."""
    instructions: str | None
    previous: str | None
    store: bool
    shown: Mapping[str, Json]
    """Name -> value, for the fields of the request that the response document repeats; a field that the
    request lacks has its default value, or None."""

    def body(self, before: Sequence[Item]) -> dict[str, Json]:
        """Returns the body of a chat completion with the same meaning as a request to /v1/responses; its
        `instructions` become the first message. before: items of the earlier conversation, which the request
        continues. Raises RequestError for an invalid item."""
        listed = _messages([*before, *self.items])
        if self.instructions is not None:
            listed.insert(0, {"role": "system", "content": self.instructions})
        return {**self.chat, "messages": list(listed)}


def call(body: Mapping[str, Json]) -> ResponsesCall:
    """Returns a checked body of /v1/responses, as the fields of an equivalent chat completions request and
    the conversation's new items. Raises RequestError for an invalid field, naming it; details of tools and
    formats are checked only with the chat completions request."""
    fields = RequestBody(body, TABLE)
    passed = (*_PASSED, "chat_template_kwargs", "enable_thinking")
    chat: dict[str, Json] = {key: fields.get(key) for key in passed}
    effort = _effort(fields.object("reasoning"))
    chat["reasoning_effort"] = effort
    chat["max_tokens"] = fields.integer("max_output_tokens")
    text_format = fields.object("text").get("format")
    chat["response_format"] = _format(text_format)
    listed, choice = fields.get("tools"), fields.get("tool_choice")
    chat["tools"], chat["tool_choice"] = _tools(listed), _choice(choice)
    shown: dict[str, Json] = {
        "instructions": fields.text("instructions"),
        "max_output_tokens": fields.integer("max_output_tokens"),
        "metadata": _metadata(fields.object("metadata")),
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", default=True),
        "previous_response_id": fields.text("previous_response_id"),
        "reasoning": {"effort": effort, "summary": None},
        "store": fields.boolean("store", default=True),
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": listed or [],
    }
    return ResponsesCall(
        items=_items(fields.get("input")),
        chat=chat,
        instructions=fields.text("instructions"),
        previous=fields.text("previous_response_id"),
        store=fields.boolean("store", default=True),
        shown=shown,
    )


def _effort(reasoning: dict[str, Json]) -> Json:
    effort = reasoning.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise wrong("reasoning.effort", f"one of {', '.join(EFFORTS)}", effort)
    return effort


def _metadata(metadata: dict[str, Json]) -> Json:
    if len(metadata) > MAX_METADATA or not all(
        isinstance(value, str) and len(key) <= 64 and len(value) <= 512 for key, value in metadata.items()
    ):
        limits = f"at most {MAX_METADATA} texts of up to 512 characters, with keys of up to 64"
        raise wrong("metadata", f"an object of {limits}", metadata)
    return metadata


def _items(value: Json) -> tuple[Item, ...]:
    if isinstance(value, str):
        return ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]},)
    if not isinstance(value, list) or not value:
        raise wrong("input", "a text, or a list of at least one item", value)
    items = []
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong(f"input[{i}]", "an object", item)
        items.append(item)
    _messages(items)
    return tuple(items)


def _messages(items: Sequence[Item]) -> list[dict[str, Json]]:
    """Returns the items of a /v1/responses conversation as chat messages. Tool calls join an assistant's
    message directly before them, or else begin one without text; reasoning joins the assistant's message that
    begins directly after it, or else is dropped. Raises RequestError for an invalid item."""
    converted: list[dict[str, Json]] = []
    reasoning = ""
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "message":
            content = _content(f"{where}.content", item.get("content"))
            converted.append({"role": item.get("role"), "content": content, **_thought(item, reasoning)})
        elif kind == "function_call":
            call: Json = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if not converted or converted[-1]["role"] != "assistant":
                converted.append({"role": "assistant", "content": "", **_thought({}, reasoning)})
            calls = converted[-1].setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append(call)
        elif kind == "function_call_output":
            output = _content(f"{where}.output", item.get("output"))
            converted.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
        elif kind == "reasoning":
            reasoning += _reasoning_text(where, item)
            continue
        else:
            raise RequestError(
                f"{where} is of type {describe(kind)}: this server takes message, function_call,"
                " function_call_output and reasoning",
                param=where,
                code="unsupported_item",
            )
        reasoning = ""
    return converted


def _thought(item: Item, reasoning: str) -> Item:
    """Returns the field of a chat message that holds its reasoning: {"reasoning_content": `reasoning`} if
    `item` of a /v1/responses conversation comes from the assistant, {} otherwise or if `reasoning` is "".
    reasoning: the text of the reasoning items just before `item`."""
    is_own = reasoning and item.get("role", "assistant") == "assistant"
    return {"reasoning_content": reasoning} if is_own else {}


def _reasoning_text(where: str, item: Item) -> str:
    """Returns the text of a reasoning item: the parts of its content, or else of its summary, joined without
    a separator. where: the item's place, for errors. Raises RequestError for any other content."""
    parts = item.get("content") or item.get("summary") or []
    texts = (
        [part.get("text") if isinstance(part, dict) else None for part in parts]
        if isinstance(parts, list)
        else [None]
    )
    if not all(isinstance(text, str) for text in texts):
        form = 'a list of parts such as {"type": "reasoning_text", "text": "..."}'
        raise wrong(f"{where}.content", form, parts)
    return "".join(map(str, texts))


def _content(where: str, content: Json) -> Json:
    """Returns the content of an item of /v1/responses, a text or a list of parts, in the format of chat
    messages; refusals become text parts, and anything but a list is returned unchanged. where: the content's
    place, for errors. Raises RequestError for a part that is not text."""
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


def _format(value: Json) -> Json:
    match value:
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        case {"type": "json_schema"}:
            raise wrong("text.format", '{"type": "json_schema", "name": "...", "schema": {...}}', value)
    return value


def _tools(value: Json) -> Json:
    if not isinstance(value, list):
        return value
    listed: list[Json] = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise RequestError(
                f"tools[{i}] is of type {describe(kind)}: this server has only functions",
                param=f"tools[{i}]",
                code="unsupported_tool",
            )
        listed.append({"type": "function", "function": tool})
    return listed


def _choice(value: Json) -> Json:
    match value:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(listed)}:
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [_choice(tool) for tool in listed]},
            }
    return value
