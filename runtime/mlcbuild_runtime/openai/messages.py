"""Checks the messages of a chat request, and converts them for a chat template: content becomes one text, the
role `developer` becomes `system`, and arguments of tool calls are parsed. Raises RequestError for invalid
ones."""

from __future__ import annotations

from collections.abc import Mapping

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe, printable

from mlcbuild_runtime.openai.body import RequestBody, checked_text, parse_json, wrong
from mlcbuild_runtime.text.chat_template import Message

ROLES = ("system", "developer", "user", "assistant", "tool")

_PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
CONTENT: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_CALL: Json = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "string", "contentMediaType": "application/json"},
            },
        },
    },
}
_SHARED: dict[str, Json] = {"content": CONTENT, "name": {"type": ["string", "null"]}}
_SHARED |= {"refusal": {"type": ["string", "null"]}, "annotations": {"type": ["array", "null"]}}
_REASONING: dict[str, Json] = {"reasoning_content": {"type": ["string", "null"]}}
MESSAGES: dict[str, Json] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"enum": ["system", "developer", "user"]}, **_SHARED},
                "additionalProperties": False,
            },
            {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"const": "tool"}, "tool_call_id": {"type": "string"}, **_SHARED},
                "additionalProperties": False,
            },
            {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"const": "assistant"}, **_SHARED, **_REASONING},
                "additionalProperties": False,
            },
            {
                "type": "object",
                "required": ["role", "tool_calls"],
                "properties": {
                    **_SHARED,
                    **_REASONING,
                    "role": {"const": "assistant"},
                    "content": {"anyOf": [CONTENT, {"type": "null"}]},
                    "tool_calls": {"type": "array", "minItems": 1, "items": _CALL},
                },
                "additionalProperties": False,
            },
        ]
    },
}
"""JSON Schema of the field `messages` of a chat completions request."""


def messages(body: RequestBody) -> tuple[Message, ...]:
    """Returns the messages of a chat request, checked and converted for chat templates: role ("system" for
    "developer"), content as one text, reasoning, tool calls with parsed arguments, and the called tool's name
    in a tool's result. Raises RequestError for an invalid message, naming it, and if there is none."""
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of at least one message", value)
    return tuple(_named([_message(f"messages[{i}]", message) for i, message in enumerate(value)]))


def _named(listed: list[Message]) -> list[Message]:
    """Returns chat messages in which each tool result has the name of the called tool, for chat templates
    that write it (Gemma, Kimi). A result keeps its own name if it has one, and has none if no earlier message
    has the call with its id."""
    names: dict[Json, Json] = {}
    named = list[Message]()
    for message in listed:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, dict) and isinstance(call["function"], dict):
                names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id")) if message["role"] == "tool" else None
        named.append(message if name is None or "name" in message else {**message, "name": name})
    return named


def _message(where: str, message: Json) -> Message:
    """Returns one message of a chat, checked, with its role ("system" for "developer"), its content as one
    text, its reasoning and its tool calls or, for the result of a tool, the call's id and the tool's name.
    where: the message's place, for errors. Raises RequestError for an invalid message."""
    if not isinstance(message, dict):
        raise wrong(where, "an object with role and content", message)
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    calls = message.get("tool_calls") if role == "assistant" else None
    accepted = {"role", "content", "name", "refusal", "annotations"}
    accepted |= {"assistant": {"tool_calls", "reasoning_content"}, "tool": {"tool_call_id"}}.get(
        str(role), set()
    )
    for key, value in message.items():
        if key not in accepted and value not in (None, []):
            place = f"{where}.{printable(key[:60])}"
            raise RequestError(
                f"{place} is {describe(value)}, which this server does not support: leave it out",
                param=place,
                code="unsupported_field",
            )
    content = message.get("content")
    if content is None and calls:
        content = ""
    text = content_text(f"{where}.content", content)
    # `developer` is OpenAI's newer name of `system`, which templates do not have.
    name = "system" if role == "developer" else str(role)
    simplified: dict[str, Json] = {"role": name, "content": text}
    if calls:
        if not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", "a list of calls", calls)
        simplified["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    if role == "assistant" and message.get("reasoning_content"):
        reasoning = message["reasoning_content"]
        simplified["reasoning_content"] = content_text(f"{where}.reasoning_content", reasoning)
        if not (calls and text):  # gpt-oss's name for it; its template refuses both beside calls
            simplified["thinking"] = simplified["reasoning_content"]
    return {**simplified, **_origin(where, message)} if role == "tool" else simplified


def _origin(where: str, message: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the fields of a tool result that name its call: the call's id, None if it is missing, and the
    tool's name if the message has it. where: the message's place, for errors. Raises RequestError for an id
    that is no text."""
    id, name = message.get("tool_call_id"), message.get("name")
    if not isinstance(id, str | None):
        raise wrong(f"{where}.tool_call_id", "a text", id)
    return {"tool_call_id": id, **({"name": name} if isinstance(name, str) else {})}


def content_text(where: str, content: Json) -> str:
    """Returns the text of a message's content: a text, or the texts of a list of text parts, joined without a
    separator. where: the content's place, for errors. Raises RequestError for any other content, None
    included, and for unpaired surrogates."""
    if isinstance(content, list):
        content = "".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise wrong(where, "a text or a list of parts", content)
    return checked_text(where, content)


def _call(where: str, call: Json) -> Json:
    """Returns a tool call of an assistant's message, checked, with its arguments parsed from text to a JSON
    value of any type, as chat templates expect them; an empty text becomes {}. where: the call's place, for
    errors. Raises RequestError for an invalid call."""
    fields = call if isinstance(call, dict) else {}
    is_function = fields.get("type", "function") == "function" and isinstance(fields.get("id", ""), str)
    match call:
        case {"function": {"name": str(name), "arguments": str(text)}} if is_function:
            try:
                arguments = parse_json(text.encode() or b"{}", f"{where}.function.arguments")
            except ValueError:
                raise wrong(f"{where}.function.arguments", "JSON in a text", text) from None
            return {
                "id": fields.get("id"),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
    raise wrong(where, 'a call such as {"id": ..., "function": {"name": ..., "arguments": "{}"}}', call)


def _part(where: str, part: Json) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise wrong(where, 'a part such as {"type": "text", "text": "..."}: this model reads text only', part)
