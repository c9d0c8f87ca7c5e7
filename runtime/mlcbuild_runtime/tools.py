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
from dataclasses import dataclass, field, replace
from typing import Literal

from mlcbuild_runtime.body import Body, checked_text, wrong
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.fields import Json
from mlcbuild_runtime.formats import schema_text
from mlcbuild_runtime.grammar import Constraint
from mlcbuild_runtime.template import Message
from mlcbuild_runtime.vocabulary import Vocabulary

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


@dataclass(frozen=True)
class Form:
    """How calls are written: FIRST (LEAD {"name": "NAME", "KEY": {...}} END), with BETWEEN between two of
    them, and LAST after all."""

    key: str
    native: bool
    """The template knows tools."""
    first: str = ""
    lead: str = ""
    end: str = ""
    between: str = "\n"
    last: str = ""
    named: str = ""
    """Where it is not empty a call is NAME, this, and the arguments."""
    optional: bool = False
    """FIRST may be left out."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Special tokens in these texts."""
    short_ids: bool = False
    """The template takes ids of nine letters and digits only."""

    @classmethod
    def of(cls, template: str, vocabulary: Vocabulary | None = None) -> Form:
        """By the words of a chat template. `vocabulary`: where their special tokens are."""
        native = "tools" in template
        if native and "<tool_call>" in template:
            return cls("arguments", native, lead="<tool_call>\n", end="\n</tool_call>")
        if native and "[TOOL_CALLS]" in template:  # Mistral's, of two ages
            tokens = _special(vocabulary, "[TOOL_CALLS]", "[ARGS]")
            form = cls("arguments", native, between="", tokens=tokens, short_ids=True)
            if "[ARGS]" in template:
                return replace(form, lead="[TOOL_CALLS]", named="[ARGS]")
            return replace(form, first="[TOOL_CALLS]", between=", ", last="]")
        if native and '"parameters"' in template:  # Llama 3's
            tokens = _special(vocabulary, "<|python_tag|>")
            return cls("parameters", native, first="".join(tokens), optional=True, tokens=tokens)
        return cls("arguments", native)

    @property
    def mark(self) -> str:
        """What tells calls from text; empty: that they begin with a brace."""
        return self.first or self.lead

    def head(self, name: str) -> str:
        """What goes between LEAD and the arguments of a call."""
        if self.named:
            return name + self.named
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.key}": '

    @property
    def tail(self) -> str:
        """What goes after them."""
        return self.end if self.named else "}" + self.end

    def write(self, name: str, arguments: Json) -> str:
        """One call as the model's text."""
        return self.lead + self.head(name) + json.dumps(arguments, ensure_ascii=False) + self.tail

    def literal(self, text: str) -> str:
        """A text of the form in Lark, with its special tokens."""
        parts = re.split("(" + "|".join(map(re.escape, self.tokens)) + ")", text) if self.tokens else [text]
        found = [
            f"<[{self.tokens[part]}]>" if part in self.tokens else json.dumps(part) for part in parts if part
        ]
        return " ".join(found)

    def call_id(self) -> str:
        """A new one."""
        return uuid.uuid4().hex[:9] if self.short_ids else f"call_{uuid.uuid4().hex[:24]}"


def _special(vocabulary: Vocabulary | None, *names: str) -> dict[str, int]:
    """Those of the names that are special tokens, which no text holds."""
    found = {name: vocabulary.token_id(name) for name in names} if vocabulary is not None else {}
    return {
        name: token
        for name, token in found.items()
        if token is not None and vocabulary is not None and not vocabulary.token_bytes(token)
    }


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


def constraint(box: Toolbox, form: Form, space: bool) -> Constraint:
    """What an answer with these tools must be. `space`: it may begin with one."""
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
        name = f"(.+?){re.escape(form.named)}" if form.named else r'\{"name": ("(?:[^"\\]|\\.)*"), '
        key = "" if form.named else re.escape(f'"{form.key}": ')
        opened = r"\s*\[?" if form.last else ""
        first = f"(?:{re.escape(form.first)})?{opened}"
        self._head = re.compile(rf"[\s,]*{first}\s*{re.escape(form.lead)}{name}{key}")

    def call_id(self) -> str:
        """Of a call that begins."""
        return self._form.call_id()

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
        begun, mark = self._held.lstrip(), self._form.mark
        if mark and not self._form.optional:
            self._state = "text"
        elif begun.startswith("{") or (mark and begun.startswith(mark)):
            self._state = "head"
        elif begun and not mark.startswith(begun):
            self._state = "text"
        yield from ()

    def _read_text(self) -> Iterator[Piece]:
        mark = self._form.mark
        place = self._held.find(mark) if mark else -1
        if place < 0:
            keep = next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)
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
            yield Piece("call", found[1] if self._form.named else str(json.loads(found[1])))

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
        end = self._form.tail
        if self._held.startswith(end):
            self._held, self._state = self._held[len(end) :], "head"
        yield from ()
