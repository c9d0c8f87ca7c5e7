"""Parses the tool calls in a model's text, by the syntax of its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from mlcbuild_runtime.openai.bare_arguments import BareReader
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.tagged_arguments import TaggedReader

_OBJECT = '{"name": "'
"""The beginning of a tool call, up to the tool's name, in the syntax whose calls are bare JSON objects,
without a mark that distinguishes them from prose."""


@dataclass(frozen=True)
class CallPiece:
    """A part of an answer: more reasoning, more text, the beginning of a call, or more of a call's
    arguments."""

    kind: Literal["reasoning", "text", "call", "arguments"]
    text: str
    """The text of this piece of an answer; for the beginning of a tool call, the tool's name; for arguments,
    the next part of their JSON text."""


class AnswerReader(Protocol):
    """The interface of parsers that split an answer into pieces (reasoning, text, tool calls) as its text
    arrives."""

    @property
    def is_thinking(self) -> bool:
        """Returns True while the text that is being read is reasoning."""
        ...

    def call_id(self) -> str:
        """Returns a new random id, in the form that the model's chat template accepts, for the tool call that
        has begun last."""
        ...

    def read(self, text: str, last: bool = False) -> Iterator[CallPiece]:
        """Adds text of the answer to the parser, and yields the parts that are complete: reasoning, text,
        beginnings of tool calls and their arguments. last: True if no more text will follow, so that text
        which was held back is yielded; what is incomplete of a tool call is dropped."""
        ...


class JsonReader:
    """Finds the end of one JSON object in a text that arrives in parts."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def read(self, text: str) -> tuple[str, int]:
        """Reads the next text of one JSON object. Returns (the beginning of `text` up to and including the
        brace that closes the object, or all of `text` if the object continues; the number of characters
        returned)."""
        end = 0
        for letter in text:
            end += 1
            if self._quoted:
                closes = letter == '"' and not self._escaped
                self._quoted, self._escaped = not closes, letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            else:
                self._depth += (letter in "{[") - (letter in "}]")
            if letter in "}]" and self.is_complete:
                break
        return text[:end], end

    @property
    def is_complete(self) -> bool:
        """Returns True if the JSON object has not begun, or if its closing brace has been read."""
        return self._depth == 0 and not self._quoted


class Reader:
    """Splits an answer of a model with tools into pieces (text and tool calls), as its text arrives. A
    constraint has shaped the answer, so that its calls are well-formed."""

    is_thinking = False

    def __init__(
        self,
        form: Form,
        choice: str,
        formatted: bool = False,
        texts: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """Creates the parser of one answer. form: the syntax of calls; choice: "required" if the answer must
        be a call, else "auto"; formatted: True if an answer without calls follows a JSON format, so that it
        may begin like a call; texts: tool name -> parameters whose values are texts, written without quotes.
        """
        self._form, self._held, self._formatted = form, "", formatted and choice == "auto"
        self._state: Literal["start", "text", "head", "arguments", "tail"]
        self._state = "head" if choice == "required" else "start"
        self._object: JsonReader | BareReader | TaggedReader = JsonReader()
        self._texts = texts or {}
        name, key = r'\{"name": ("(?:[^"\\]|\\.)*"), ', re.escape(f'"{form.key}": ')
        if form.by_name is not None:
            number, after = r":\d+" if form.by_name.numbered else "", re.escape(form.by_name.after)
            before = re.escape(form.by_name.before)
            name, key = f"{before}(.+?){number}{after}" if after else f"{before}([^<{{]+)(?=[<{{])", ""
        opened = rf"\s*(?:{re.escape(form.opening)})?" if form.opening else ""
        first = f"(?:{re.escape(form.first)})?{opened}"
        self._head = re.compile(rf"[\s,]*{first}\s*{re.escape(form.lead)}{name}{key}")

    def call_id(self) -> str:
        """Returns a new random id, in the form that the model's chat template accepts, for the tool call that
        has begun last."""
        return self._form.call_id()

    def read(self, text: str, last: bool = False) -> Iterator[CallPiece]:
        """Adds text of the answer to the parser, and yields the parts that are complete: text, beginnings of
        tool calls and their arguments. last: True if no more text will follow, so that text which was held
        back is yielded; an incomplete beginning of a tool call is dropped, or yielded as text if answers
        without calls follow a JSON format."""
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
            yield CallPiece("text", self._held)

    def _read_start(self) -> Iterator[CallPiece]:
        begun, mark = self._held.lstrip(), self._form.mark
        if mark and not self._form.optional:
            self._state = "text"
        elif begun.startswith("{") or (mark and begun.startswith(mark)):
            self._state = "head"
        elif begun and not mark.startswith(begun):
            self._state = "text"
        yield from ()

    def _read_text(self) -> Iterator[CallPiece]:
        mark = self._form.mark
        place = self._held.find(mark) if mark else -1
        if place < 0:
            keep = next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)
            place = len(self._held) - keep
        else:
            self._state = "head"
        if place:
            yield CallPiece("text", self._held[:place])
            self._held = self._held[place:]

    def _read_head(self) -> Iterator[CallPiece]:
        match = self._head.match(self._held)
        if match is not None:
            self._held, self._state, self._formatted = self._held[match.end() :], "arguments", False
            name = str(json.loads(match[1])) if self._form.by_name is None else match[1]
            self._object = self._arguments_reader(name)
            yield CallPiece("call", name)
        begun = self._held.lstrip()
        if self._formatted and begun.startswith("{") and not _OBJECT.startswith(begun[: len(_OBJECT)]):
            self._state = "text"

    def _arguments_reader(self, name: str) -> JsonReader | BareReader | TaggedReader:
        """Returns a new parser of the arguments of one call of the tool `name`, in the syntax of the model's
        calls: tags, bare keys or JSON."""
        if self._form.tags is not None:
            return TaggedReader(self._form.tags, self._form.tail, self._texts.get(name, ()))
        return BareReader(self._form.quote) if self._form.quote else JsonReader()

    def _read_arguments(self) -> Iterator[CallPiece]:
        """Removes from the held text what belongs to a tool call's arguments, up to their end, and yields it
        as JSON text."""
        text, size = self._object.read(self._held)
        self._held = self._held[size:]
        if text:
            yield CallPiece("arguments", text)
        if (text or size) and self._object.is_complete:
            self._state = "tail"

    def _read_tail(self) -> Iterator[CallPiece]:
        end = self._form.tail
        if self._held.startswith(end):
            self._held, self._state = self._held[len(end) :], "head"
        yield from ()
