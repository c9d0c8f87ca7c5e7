"""Tools: reads the tools of a request, and constrains an answer to valid calls.

If the chat template supports tools, it describes them to the model, and calls have the syntax that models
with such a template write; otherwise a system message describes them. Either way a grammar makes calls
well-formed: their names are those of the tools, and the tools' schemas accept their arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe

from mlcbuild_runtime.constraints.lark import Constraint, as_rule
from mlcbuild_runtime.openai.bare_arguments import BareRules
from mlcbuild_runtime.openai.body import RequestBody, checked_text, wrong
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.response_format import schema_text
from mlcbuild_runtime.openai.tagged_arguments import TagRules
from mlcbuild_runtime.text.chat_template import Message

MAX_TOOLS = 128
ANY_TEXT = r"/(.|\n)*/"
"""A Lark terminal that matches any text, with line breaks or empty."""
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
"""JSON Schema of the field `tool_choice` of a chat completions request."""


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON Schema of the tool's arguments, which are an object."""


@dataclass(frozen=True)
class Toolbox:
    """The tools of a chat request, and the rules by which the answer may call them."""

    tools: tuple[Tool, ...]
    """The tools that the answer may call."""
    choice: Literal["auto", "required"]
    """"auto" if the answer may call tools, "required" if it must. If the request names one tool in
    `tool_choice`, that tool is the only one in `tools`, and this is "required"."""
    parallel: bool
    """True if one answer may contain several tool calls."""
    described: tuple[Tool, ...] = ()
    """The tools that the prompt describes; () means the same as `tools`. The two differ if `allowed_tools`
    restricts the calls: the prompt, and with it the prefix cache, stays the same."""


def toolbox(body: RequestBody) -> Toolbox | None:
    """Returns the tools of a chat request, from its fields `tools`, `tool_choice` and `parallel_tool_calls`;
    None if the answer cannot have calls. Raises RequestError for invalid tools, or a choice that does not fit
    them."""
    listed_tools, choice = body.get("tools"), body.get("tool_choice")
    if listed_tools is None or listed_tools == []:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                f"tool_choice is {describe(choice)}, which requires tools, and the request has none:"
                " send tools, or leave tool_choice out",
                param="tool_choice",
            )
        return None
    if not isinstance(listed_tools, list) or len(listed_tools) > MAX_TOOLS:
        raise wrong("tools", f"a list of at most {MAX_TOOLS} tools", listed_tools)
    tools = tuple(_tool(f"tools[{i}]", item) for i, item in enumerate(listed_tools))
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
    """Returns those of `tools` to which the request restricts the model, each once. listed: entries of
    `allowed_tools`, which name the tools. Raises RequestError for an entry that names no tool of `tools`, or
    if there are no entries."""
    by_name, allowed = {tool.name: tool for tool in tools}, dict[str, Tool]()
    for i, item in enumerate(listed):
        match item:
            case {"type": "function", "function": {"name": str(name)}} if name in by_name:
                allowed[name] = by_name[name]
            case _:
                where = f"tool_choice.allowed_tools.tools[{i}]"
                raise wrong(
                    where, 'a tool of `tools`: {"type": "function", "function": {"name": NAME}}', item
                )
    if not allowed:
        raise wrong("tool_choice.allowed_tools.tools", "a list of at least one tool", [*listed])
    return tuple(allowed.values())


def _tool(where: str, value: Json) -> Tool:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict):
        raise wrong(where, 'an object such as {"type": "function", "function": {"name": ...}}', value)
    name, description = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise wrong(f"{where}.function.name", "1 to 64 letters, digits, '_', '.' or '-'", name)
    if not isinstance(description, str):
        raise wrong(f"{where}.function.description", "a text", description)
    # Without a schema a function has no parameters, as OpenAI defines it; `{}` would allow any.
    parameters = function.get("parameters")
    parameters = {"properties": {}} if parameters is None else parameters
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise wrong(f"{where}.function.parameters", "a JSON schema of an object", parameters)
    text = checked_text(f"{where}.function.description", description)
    return Tool(name, text, {"type": "object", **parameters})


def constraint(
    box: Toolbox, form: Form, space: bool, answer: Constraint | None = None, prose: str = ANY_TEXT
) -> Constraint:
    """Returns the constraint, a Lark grammar, of an answer that may call tools.

    box: the tools, and whether a call is required; form: the syntax of calls; space: True if the answer may
    begin with a space; answer: constraint of an answer without calls, which then excludes text before calls,
    None for free text; prose: Lark terminal of that free text, unless the syntax of calls demands another
    one. Where a call is required, `answer` and `prose` have no effect; otherwise RequestError is raised if
    `answer` is a grammar of the request.
    """
    rules, calls = _calls(box.tools, form)
    lead, last = form.literal(form.lead), form.literal(form.last)
    again = f"({form.literal(form.between)} {lead} call)*" if box.parallel else ""
    rules += [f"call: {calls}", f"calls: {lead} call {again} {last}"]
    mark, space_first = form.literal(form.mark), '" "? ' if space else ""
    if form.opening:  # Mistral's older models write a space.
        rules[-1] = f'calls: " "? {form.literal(form.opening)} call {again} {last}'
    begun = f"{form.literal(form.first)} calls"
    if form.optional and mark:
        begun = f"{mark}? calls"
    text = f"TEXT: {prose}"
    if box.choice == "required":
        rules.append(f"start: {space_first}{begun}")
    elif answer is not None:
        if answer.kind == "lark":
            raise RequestError(
                "tools and a response format with a grammar cannot be combined: send one of them",
                param="response_format",
            )
        rules.append(f"start: {space_first}({begun} | {as_rule(answer)})")
    elif form.optional or not mark:
        later = f"({mark} calls)?" if mark else ""
        # Text that begins like a call must be one.
        rules += [f"start: {space_first}({begun} | prose {later})", r"prose: /([^ {](.|\n)*)?/"]
    elif form.mark in form.tokens:
        rules += [f"start: TEXT ({begun})?", text]
    else:
        rest = "calls" if form.first else f"call {again} {last}"
        rules += [f"start: TEXT | head {rest}", f"head[lazy]: TEXT {mark}", text]
    return Constraint("lark", "\n".join(rules), "tools")


def _calls(tools: Sequence[Tool], form: Form) -> tuple[list[str], str]:
    """Returns (rules of a Lark grammar, a Lark expression that refers to them and matches one call of one of
    `tools` in the syntax `form`, from the tool's name to the end of the call)."""
    bare = BareRules(form.quote, form.literal) if form.quote else None
    tagged = TagRules(form.tags, form.tail, form.literal) if form.tags is not None else None
    tail, calls = form.literal(form.tail), list[str]()
    for tool in tools:
        if tagged is not None:
            arguments = f"({tagged.arguments(*_tagged(tool))})"
        elif bare is not None:
            arguments = f"{bare.value({**tool.parameters})} {tail}"
        else:
            arguments = f"%json {schema_text(tool.parameters)} {tail}"
        calls.append(f"{form.head_rule(tool.name)} {arguments}")
    rules = tagged or bare
    return ([] if rules is None else rules.listed), " | ".join(calls)


def _tagged(tool: Tool) -> tuple[dict[str, dict[str, Json] | bool], list[Json], frozenset[str]]:
    """Returns three values that describe a tool's parameters: (key -> its JSON schema, with the tool's
    `$defs` and `definitions` so that references in it resolve; keys of the required parameters; keys of those
    whose values are texts)."""
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    schemas: dict[str, dict[str, Json] | bool] = {
        key: {**schema, **shared} if isinstance(schema, dict) else bool(schema)
        for key, schema in _properties(tool).items()
    }
    required = tool.parameters.get("required")
    return schemas, required if isinstance(required, list) else [], text_parameters(tool)


def text_parameters(tool: Tool) -> frozenset[str]:
    """Returns the names of a tool's parameters whose values are texts (type `string`, possibly with `null`,
    or an `enum` of texts that are not empty), according to their JSON schemas."""
    return frozenset(key for key, schema in _properties(tool).items() if _is_text(schema))


def _properties(tool: Tool) -> dict[str, Json]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_text(schema: Json) -> bool:
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    if isinstance(values, list):
        return bool(values) and all(isinstance(value, str) and value for value in values)
    return schema.get("type") in ("string", ["string"], ["string", "null"])


def documents(box: Toolbox) -> list[Json]:
    """Returns the tools that the prompt describes as JSON objects, in the format that chat templates read.
    box: the tools of the request."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in box.described or box.tools
    ]


def numbered(messages: Sequence[Message], form: Form) -> list[Message]:
    """Returns the messages of a chat, as a new list, with the ids of tool calls and of their results that the
    model itself would write, if the syntax of calls, `form`, numbers them: such templates show the ids to the
    model, and clients may have others. Other messages, and results of no earlier call, stay as they are."""
    ids, count, shown = dict[Json, Json](), 0, list[Message]()
    for message in messages:
        calls, result_of = message.get("tool_calls"), message.get("tool_call_id")
        if isinstance(calls, list):
            renamed: list[Json] = []
            for call in calls:
                assert isinstance(call, dict) and isinstance(call["function"], dict)
                new_id = form.numbered_id(str(call["function"]["name"]), count)
                ids[call["id"]] = call["id"] if new_id is None else new_id
                renamed.append({**call, "id": ids[call["id"]]})
                count += 1
            shown.append({**message, "tool_calls": renamed})
        elif message["role"] == "tool" and result_of in ids:
            shown.append({**message, "tool_call_id": ids[result_of]})
        else:
            shown.append(message)
    return shown


def in_words(messages: Sequence[Message], box: Toolbox | None, form: Form) -> list[Message]:
    """Returns the messages of a chat, as a new list, for a template without support for tools: tool calls
    become text, their results messages of the user, and the system message, a new one if there is none, also
    describes the tools. box: the tools of the request, None for none; form: the syntax of calls."""
    as_text: list[Message] = []
    names: dict[Json, str] = {}
    for message in messages:
        content, calls = message["content"], message.get("tool_calls")
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id"), "the tool")
            as_text.append({"role": "user", "content": f"Result of {name}: {content}"})
        elif isinstance(calls, list):
            written = []
            for call in calls:
                assert isinstance(call, dict) and isinstance(call["function"], dict)
                name = str(call["function"]["name"])
                names[call["id"]] = name
                written.append(form.write(name, call["function"]["arguments"]))
            text = "\n".join([*([content] if isinstance(content, str) and content else []), *written])
            as_text.append({"role": message["role"], "content": text})
        else:
            as_text.append(message)
    if box is None:
        return as_text
    instructions = _instructions(box, form)
    if as_text and as_text[0]["role"] == "system":
        return [{"role": "system", "content": f"{as_text[0]['content']}\n\n{instructions}"}, *as_text[1:]]
    return [{"role": "system", "content": instructions}, *as_text]


def _instructions(box: Toolbox, form: Form) -> str:
    shown = "\n".join(_in_short(tool) for tool in box.described or box.tools)
    return f"Tools:\n{shown}\nTo call one, answer with a line such as\n{form.write('NAME', {})}"


def _in_short(tool: Tool) -> str:
    """Returns a tool as JSON with few tokens: no spaces, no empty description, and no parameters if the tool
    has none.
    """
    shown: dict[str, Json] = {"name": tool.name}
    if tool.description:
        shown["description"] = tool.description
    if tool.parameters != {"type": "object", "properties": {}}:
        shown["parameters"] = dict(tool.parameters)
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
