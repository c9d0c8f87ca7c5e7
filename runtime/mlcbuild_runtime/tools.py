"""Tools: what a request offers, how a call looks in the model's text, and calls out of that text.

Where the chat template knows tools, it tells the model of them, and a call looks as models with such a
template write it; otherwise a system message tells of them. Either way a grammar makes calls well-formed:
their names are those of the tools, their arguments are what the tools' schemas accept.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlcbuild_runtime.body import Body, checked_text, wrong
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.fields import Json
from mlcbuild_runtime.formats import schema_text
from mlcbuild_runtime.grammar import Constraint
from mlcbuild_runtime.template import Message

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
TOOL_CHOICE: dict[str, Json] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}},
                },
            },
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
    choice: Literal["auto", "required"]
    """Whether there must be a call. A tool that is named is the only one in the box, and required."""
    parallel: bool
    """There may be several calls."""


@dataclass(frozen=True)
class Form:
    """How a call is written: begin {"name": "NAME", "KEY": {...}} end."""

    begin: str
    end: str
    key: str
    native: bool
    """The template knows tools."""

    @classmethod
    def of(cls, template: str) -> Form:
        """By the words of a chat template."""
        native = "tools" in template
        if native and "<tool_call>" in template:
            return cls("<tool_call>\n", "\n</tool_call>", "arguments", native)
        key = "parameters" if native and '"parameters"' in template else "arguments"
        return cls("", "", key, native)

    def write(self, name: str, arguments: Json) -> str:
        """One call as the model's text."""
        head = json.dumps(name, ensure_ascii=False)
        body = f'{{"name": {head}, "{self.key}": {json.dumps(arguments, ensure_ascii=False)}}}'
        return self.begin + body + self.end


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
            return Toolbox((tools[names.index(name)],), "required", False)
    named = '{"type": "function", "function": {"name": NAME}} with the name of a tool'
    raise wrong("tool_choice", f'"none", "auto", "required" or {named}', choice)


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


def constraint(box: Toolbox, form: Form, space: bool) -> Constraint:
    """What an answer with these tools must be. `space`: it may begin with one."""
    key = json.dumps(f', "{form.key}": ')
    calls = [
        f"{json.dumps(json.dumps({'name': tool.name})[:-1])} {key} %json {schema_text(tool.parameters)}"
        for tool in box.tools
    ]
    again = f'("\\n" {_literal(form.begin)} call)*' if box.parallel else ""
    rules = [f'call: ({" | ".join(calls)}) "}}" {_literal(form.end)}', r"TEXT: /(.|\n)*/"]
    lead = '" "? ' if space else ""
    if box.choice == "required":
        rules.append(f"start: {lead}{_literal(form.begin)} call {again}")
    elif form.begin:
        rules += [f"start: TEXT | head call {again}", f"head[lazy]: TEXT {_literal(form.begin)}"]
    else:
        # What begins as a call is one.
        rules += [f"start: {lead}(call {again} | prose)", r"prose: /([^ {](.|\n)*)?/"]
    return Constraint("lark", "\n".join(rules), "tools")


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


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
        for tool in box.tools
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
        for tool in box.tools
    )
    return f"Tools:\n{shown}\nTo call one, answer with a line such as\n{form.write('NAME', {})}"


@dataclass(frozen=True)
class Piece:
    """A part of an answer: more text, the beginning of a call, or more of its arguments."""

    kind: Literal["text", "call", "arguments"]
    text: str
    """For a call: the tool's name."""


class Reader:
    """The pieces of an answer under `constraint`, as its text comes."""

    def __init__(self, form: Form, choice: str) -> None:
        self._form, self._held = form, ""
        self._state: Literal["start", "text", "head", "arguments", "tail"]
        self._state = "head" if choice == "required" else "start"
        self._depth, self._quoted, self._escaped = 0, False, False
        head = re.escape(form.begin) + r'\{"name": ("(?:[^"\\]|\\.)*"), "' + re.escape(form.key) + '": '
        self._head = re.compile(r"\s*" + head)

    def read(self, text: str, last: bool = False) -> Iterator[Piece]:
        """`last`: no more text will come."""
        self._held += text
        step = {
            "start": self._read_start,
            "text": self._read_text,
            "head": self._read_head,
            "arguments": self._read_arguments,
            "tail": self._read_tail,
        }
        while self._held:
            before = self._state, len(self._held)
            yield from step[self._state]()
            if (self._state, len(self._held)) == before:
                break
        if last and self._held and self._state in ("start", "text"):
            yield Piece("text", self._held)

    def _read_start(self) -> Iterator[Piece]:
        if self._form.begin:
            self._state = "text"
        elif self._held.lstrip():
            self._state = "head" if self._held.lstrip().startswith("{") else "text"
        yield from ()

    def _read_text(self) -> Iterator[Piece]:
        begin = self._form.begin
        place = self._held.find(begin) if begin else -1
        if place < 0:
            keep = next((n for n in range(len(begin) - 1, 0, -1) if self._held.endswith(begin[:n])), 0)
            place = len(self._held) - keep
        else:
            self._state = "head"
        if place:
            yield Piece("text", self._held[:place])
            self._held = self._held[place:]

    def _read_head(self) -> Iterator[Piece]:
        found = self._head.match(self._held)
        if found is not None:
            self._held, self._state = self._held[found.end() :], "arguments"
            yield Piece("call", str(json.loads(found[1])))

    def _read_arguments(self) -> Iterator[Piece]:
        """To the brace that closes the first one."""
        end = 0
        for letter in self._held:
            end += 1
            if self._quoted:
                closes = letter == '"' and not self._escaped
                self._quoted, self._escaped = not closes, letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            else:
                self._depth += (letter in "{[") - (letter in "}]")
            if self._depth == 0 and not self._quoted and letter in "}]":
                self._state = "tail"
                break
        yield Piece("arguments", self._held[:end])
        self._held = self._held[end:]

    def _read_tail(self) -> Iterator[Piece]:
        end = "}" + self._form.end
        if self._held.startswith(end):
            self._held, self._state = self._held[len(end) :], "head"
        yield from ()


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
