"""Calls of tools: how they look in the model's text, by its chat template, and calls out of that text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from mlcbuild_format.fields import Json

from mlcbuild_runtime.text.vocabulary import Vocabulary


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


_OBJECT = '{"name": "'
"""How a call begins that nothing else tells from text."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer: more text, the beginning of a call, or more of its arguments."""

    kind: Literal["text", "call", "arguments"]
    text: str
    """For a call: the tool's name."""


class Reader:
    """The pieces of an answer under `constraint`, as its text comes."""

    def __init__(self, form: Form, choice: str, formatted: bool = False) -> None:
        """`formatted`: an answer that calls nothing has a form, too, so that it may begin as a call does."""
        self._form, self._held, self._formatted = form, "", formatted and choice == "auto"
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
        if last and self._held and (self._state in ("start", "text") or self._formatted):
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
            self._held, self._state, self._formatted = self._held[found.end() :], "arguments", False
            yield Piece("call", found[1] if self._form.named else str(json.loads(found[1])))
        begun = self._held.lstrip()
        if self._formatted and begun.startswith("{") and not _OBJECT.startswith(begun[: len(_OBJECT)]):
            self._state = "text"

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
