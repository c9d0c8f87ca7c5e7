"""Tools: what a request offers, and what an answer with them must be.

Where the chat template knows tools, it tells the model of them, and a call looks as models with such a
template write it; otherwise a system message tells of them. Either way a grammar makes calls well-formed:
their names are those of the tools, their arguments are what the tools' schemas accept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.constraints.lark import Constraint, as_rule
from mlcbuild_runtime.openai.body import Body, checked_text, wrong
from mlcbuild_runtime.openai.call_syntax import Form
from mlcbuild_runtime.openai.response_format import schema_text
from mlcbuild_runtime.text.chat_template import Message

MAX_TOOLS = 128
_NAME = "[A-Za-z0-9_.-]{1,64}"

FUNCTION: dict[str, Json] = {
    "name": {"type": "string", "pattern": f"^{_NAME}$"},
    "description": {"type": ["string", "null"]},
    "parameters": {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
}
TOOLS: dict[str, Json] = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": FUNCTION,
            },
        },
    },
}
_NAMED: dict[str, Json] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
_ALLOWED: dict[str, Json] = {
    "type": "object",
    "required": ["mode", "tools"],
    "properties": {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "items": _NAMED},
    },
}
TOOL_CHOICE: dict[str, Json] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _NAMED,
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED},
        },
    ]
}
"""JSON Schemas of the fields."""


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON schema of an object."""


@dataclass(frozen=True)
class Toolbox:
    tools: tuple[Tool, ...]
    """That may be called."""
    choice: Literal["auto", "required"]
    """Whether there must be a call. A tool that is named is the only one in the box, and required."""
    parallel: bool
    """There may be several calls."""
    told: tuple[Tool, ...] = ()
    """That the prompt tells of; empty: the same. `allowed_tools` may change while the prompt, and so what is
    cached of it, does not."""


def toolbox(body: Body) -> Toolbox | None:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`; None: no calls. Raises RequestError."""
    found, choice = body.get("tools"), body.get("tool_choice")
    if found is None or found == []:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    if not isinstance(found, list) or len(found) > MAX_TOOLS:
        raise wrong("tools", f"a list of at most {MAX_TOOLS} tools", found)
    tools = tuple(_tool(f"tools[{i}]", item) for i, item in enumerate(found))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools must have different names", param="tools")
    parallel = body.boolean("parallel_tool_calls", default=True)
    match choice:
        case "none":
            return None
        case None | "auto":
            return Toolbox(tools, "auto", parallel)
        case "required":
            return Toolbox(tools, "required", parallel)
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            named = (tools[names.index(name)],)
            return Toolbox(named, "required", False)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)},
        }:
            return Toolbox(_allowed(listed, tools), mode, parallel, tools)
    form = '{"type": "function", "function": {"name": NAME}} with the name of a tool'
    several = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
    raise wrong("tool_choice", f'"none", "auto", "required", {form}, or {several}', choice)


def _allowed(listed: Sequence[Json], tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Those of `tools` that are listed. Raises RequestError."""
    known, found = {tool.name: tool for tool in tools}, dict[str, Tool]()
    for i, item in enumerate(listed):
        match item:
            case {"type": "function", "function": {"name": str(name)}} if name in known:
                found[name] = known[name]
            case _:
                where = f"tool_choice.allowed_tools.tools[{i}]"
                raise wrong(
                    where, 'a tool of `tools`: {"type": "function", "function": {"name": NAME}}', item
                )
    if not found:
        raise wrong("tool_choice.allowed_tools.tools", "a list of at least one tool", [*listed])
    return tuple(found.values())


def _tool(where: str, found: Json) -> Tool:
    function = found.get("function") if isinstance(found, dict) and found.get("type") == "function" else None
    if not isinstance(function, dict):
        raise wrong(where, 'an object such as {"type": "function", "function": {"name": ...}}', found)
    name, description = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise wrong(f"{where}.function.name", "1 to 64 letters, digits, '_', '.' or '-'", name)
    if not isinstance(description, str):
        raise wrong(f"{where}.function.description", "a text", description)
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise wrong(f"{where}.function.parameters", "a JSON schema of an object", parameters)
    text = checked_text(f"{where}.function.description", description)
    return Tool(name, text, {"type": "object", **parameters})


def constraint(box: Toolbox, form: Form, space: bool, answer: Constraint | None = None) -> Constraint:
    """What an answer with these tools must be. `space`: it may begin with one. `answer`: what it must be when
    it calls none. Raises RequestError."""
    written = [(form.literal(form.head(tool.name)), schema_text(tool.parameters)) for tool in box.tools]
    calls = " | ".join(f"{head} %json {schema}" for head, schema in written)
    lead, last = form.literal(form.lead), form.literal(form.last)
    again = f"({form.literal(form.between)} {lead} call)*" if box.parallel else ""
    rules = [f"call: ({calls}) {form.literal(form.tail)}", f"calls: {lead} call {again} {last}"]
    mark, space_first = form.literal(form.mark), '" "? ' if space else ""
    if form.last:
        rules[1] = f'calls: " "? "[" call {again} {last}'  # with a space in Mistral's older models
    begun = f"{form.literal(form.first)} calls"
    if form.optional and mark:
        begun = f"{mark}? calls"
    text = r"TEXT: /(.|\n)*/"
    if box.choice == "required":
        rules.append(f"start: {space_first}{begun}")
    elif answer is not None:
        if answer.kind == "lark":
            raise RequestError("tools and a grammar are two grammars: send one", param="response_format")
        rules.append(f"start: {space_first}({begun} | {as_rule(answer)})")
    elif form.optional or not mark:
        later = f"({mark} calls)?" if mark else ""
        # What begins as a call is one.
        rules += [f"start: {space_first}({begun} | prose {later})", r"prose: /([^ {](.|\n)*)?/"]
    elif form.mark in form.tokens:
        rules += [f"start: TEXT ({begun})?", text]
    else:
        rest = "calls" if form.first else f"call {again} {last}"
        rules += [f"start: TEXT | head {rest}", f"head[lazy]: TEXT {mark}", text]
    return Constraint("lark", "\n".join(rules), "tools")


def documents(box: Toolbox) -> list[Json]:
    """The tools as a template takes them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in box.told or box.tools
    ]


def in_words(messages: Sequence[Message], box: Toolbox | None, form: Form) -> list[Message]:
    """Messages for a template that knows no tools: calls and their results as text."""
    plain: list[Message] = []
    names: dict[Json, str] = {}
    for message in messages:
        content, calls = message["content"], message.get("tool_calls")
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id"), "the tool")
            plain.append({"role": "user", "content": f"Result of {name}: {content}"})
        elif isinstance(calls, list):
            written = []
            for call in calls:
                assert isinstance(call, dict) and isinstance(call["function"], dict)
                name = str(call["function"]["name"])
                names[call["id"]] = name
                written.append(form.write(name, call["function"]["arguments"]))
            text = "\n".join([*([content] if isinstance(content, str) and content else []), *written])
            plain.append({"role": message["role"], "content": text})
        else:
            plain.append(message)
    if box is None:
        return plain
    told = _instructions(box, form)
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _instructions(box: Toolbox, form: Form) -> str:
    shown = "\n".join(
        json.dumps({"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)})
        for tool in box.told or box.tools
    )
    return f"Tools:\n{shown}\nTo call one, answer with a line such as\n{form.write('NAME', {})}"
