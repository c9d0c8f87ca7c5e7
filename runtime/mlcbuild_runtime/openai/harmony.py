"""Reads and constrains answers in channels, as gpt-oss writes them (OpenAI's harmony format).

Reasoning, calls and text are messages of one answer, each with a header that names its channel and, for a
call, the function.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mlcbuild_format.errors import RequestError

from mlcbuild_runtime.constraints.lark import Constraint, as_rule
from mlcbuild_runtime.openai.call_forms import special_tokens
from mlcbuild_runtime.openai.call_syntax import CallPiece
from mlcbuild_runtime.openai.response_format import schema_text
from mlcbuild_runtime.openai.tools import ANY_TEXT, Toolbox
from mlcbuild_runtime.text.vocabulary import Vocabulary

_CHANNEL, _MESSAGE, _END, _START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_CONSTRAIN, _CALL, _RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKS = (_CHANNEL, _MESSAGE, _END, _START, _CONSTRAIN, _CALL, _RETURN)
_ENDS = (_END, _CALL, _RETURN, _START)
_BEGINNINGS = (_CHANNEL, _START, _MESSAGE, " to=", "to=", "assistant")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")


@dataclass(frozen=True)
class Harmony:
    """The special tokens of OpenAI's harmony format, in which a model divides its answer into channels:
    reasoning, tool calls and text.
    """

    tokens: Mapping[str, int]
    """Text of a mark, such as "<|channel|>" -> number of its special token, for all marks with which OpenAI's
    harmony format divides an answer."""

    @classmethod
    def of(cls, template: str, vocabulary: Vocabulary) -> Harmony | None:
        """Returns the harmony format if a chat template uses it; None if its answers have no channels, or if
        the vocabulary lacks the special tokens of the format.
        """
        if not all(mark in template for mark in (_CHANNEL, _MESSAGE, _START)):
            return None
        tokens = special_tokens(vocabulary, *MARKS)
        return cls(tokens) if len(tokens) == len(MARKS) else None

    def constraint(self, box: Toolbox | None, answer: Constraint | None) -> Constraint | None:
        """Returns the constraint, a Lark grammar, of an answer in OpenAI's harmony format; None if any answer
        is allowed. box: the tools that the answer may or must call, None for none; answer: constraint of the
        answer's text, such as a JSON schema, or None. Raises RequestError if the request states a grammar
        beside tools."""
        if box is None and answer is None:
            return None
        if box is not None and answer is not None and answer.kind == "lark":
            raise RequestError(
                "tools and a response format with a grammar cannot be combined: send one of them",
                param="response_format",
            )
        text = "TEXT"
        if answer is not None:
            text = f"%lark {{\n{answer.source}\n}}" if answer.kind == "lark" else as_rule(answer)
        ends = list[str]()
        if box is None or box.choice == "auto":
            ends.append(f'{self._mark(_CHANNEL)} "final" {self._mark(_MESSAGE)} {text}')
        if box is not None:
            ends.append("call")
        if box is not None and box.choice == "auto" and answer is None:
            ends.append(f"{self._mark(_CHANNEL)} CHANNEL {self._mark(_MESSAGE)} TEXT")
        # A preamble in the channel `commentary` would stand before the text that has a format.
        channels = '"analysis" | "commentary"' if answer is None else '"analysis"'
        again = f'{self._mark(_END)} {self._mark(_START)} "assistant"'
        rules = [
            f"start: note* ({' | '.join(ends)})",
            f"note: {self._mark(_CHANNEL)} CHANNEL {self._mark(_MESSAGE)} TEXT {again}",
            f"CHANNEL: {channels}",
            f"TEXT: {ANY_TEXT}",
            *self._calls(box),
        ]
        return Constraint("lark", "\n".join(rules), "tools" if answer is None else answer.param)

    def _calls(self, box: Toolbox | None) -> Iterator[str]:
        """Yields the Lark rules that match a call of one of the request's tools in OpenAI's harmony format.
        box: these tools; None yields no rule. The model may name the function in front of the channel's name
        or after it."""
        if box is None:
            return
        channel, message = self._mark(_CHANNEL), self._mark(_MESSAGE)
        calls = list[str]()
        for tool in box.tools:
            arguments = f"{message} %json {schema_text(tool.parameters)}"
            calls.append(f'{channel} "commentary to=functions.{tool.name}" kind {arguments}')
            calls.append(f'" to=functions.{tool.name}" {channel} "commentary" kind {arguments}')
        yield f"call: {' | '.join(calls)}"
        yield f'kind: (" "? {self._mark(_CONSTRAIN)} "json" | " json")?'

    def _mark(self, text: str) -> str:
        return f"<[{self.tokens[text]}]>"


class HarmonyReader:
    """Splits an answer in harmony channels into pieces (reasoning, text, tool calls), as its text arrives."""

    def __init__(self, has_tools: bool) -> None:
        self._has_tools, self._held, self._is_first = has_tools, "", True
        self._kind = ""
        """Kind of the harmony message that is being read: "reasoning", "text" or "arguments"; "" while its
        header is being read."""
        self._kinds = set[str]()
        """Kinds ("reasoning", "text", "arguments") of the harmony messages that have ended. An empty line
        separates a message from an earlier one of its kind."""

    @property
    def is_thinking(self) -> bool:
        """Returns True while the text that is being read is reasoning."""
        return self._kind == "reasoning"

    def call_id(self) -> str:
        """Returns a new random id, "call_" and 24 hexadecimal digits, for the tool call begun last."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def read(self, text: str, last: bool = False) -> Iterator[CallPiece]:
        """Adds text of the answer to the parser, and yields the parts that are complete: reasoning, text,
        beginnings of tool calls and their arguments. last: True if no more text will follow; an incomplete
        header is then dropped."""
        self._held += text
        while self._held:
            before = self._kind, len(self._held)
            yield from self._read_body(last) if self._kind else self._read_header()
            if (self._kind, len(self._held)) == before:
                break

    def _read_header(self) -> Iterator[CallPiece]:
        begun, buffered = self._held.lstrip("\n"), self._held
        if self._is_first and not any(mark.startswith(begun[: len(mark)]) for mark in _BEGINNINGS):
            self._kind = "text"  # the model left its format
            return
        header, mark, rest = buffered.partition(_MESSAGE)
        if not mark:
            return
        self._held, self._is_first = rest, False
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._has_tools:
            self._kind = "arguments"
            yield CallPiece("call", recipient[1])
        else:
            self._kind = "reasoning" if f"{_CHANNEL}analysis" in header else "text"

    def _read_body(self, last: bool) -> Iterator[CallPiece]:
        buffered = self._held
        places = [(place, mark) for mark in _ENDS if (place := buffered.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            body, self._held = buffered[:place], buffered[place + len(mark) :]
        else:
            keep = next(
                (n for n in range(len(buffered)) if any(m.startswith(buffered[n:]) for m in _ENDS)),
                len(buffered),
            )
            body, self._held = (buffered, "") if last else (buffered[:keep], buffered[keep:])
        if body:
            yield self._piece(body)
        if places:
            self._kinds.add(self._kind)
            self._kind = ""

    def _piece(self, body: str) -> CallPiece:
        if self._kind == "arguments":
            return CallPiece("arguments", body)
        if self._kind in self._kinds:
            self._kinds.discard(self._kind)
            body = f"\n\n{body}"
        return CallPiece("reasoning" if self._kind == "reasoning" else "text", body)
