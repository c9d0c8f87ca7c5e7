"""Separates a model's reasoning from its answer, and constrains only the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from mlcbuild_format.fields import Json

from mlcbuild_runtime.constraints.lark import Constraint, as_rule
from mlcbuild_runtime.openai.call_forms import special_tokens
from mlcbuild_runtime.openai.call_syntax import AnswerReader, CallPiece
from mlcbuild_runtime.text.vocabulary import Vocabulary

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thought>", "</thought>"),
)
"""Pairs (text before, text after) of the marks around the reasoning of models, in this order: Qwen, DeepSeek,
GLM and most others; Magistral; Seed-OSS; Kimi-VL; Command A; EXAONE Deep."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Values of the request field `reasoning_effort`, from no reasoning to the most."""


@dataclass(frozen=True)
class Thinking:
    """The reasoning (text between two marks) that may precede one answer."""

    begin: str
    end: str
    begun: bool
    """True if the prompt ends with the mark that begins reasoning, so that the model's text starts with its
    reasoning."""
    tokens: Mapping[str, int]
    """Text of a mark -> number of its token in the vocabulary. The marks are the two texts around a model's
    reasoning, such as "<think>" and "</think>"; only those that are special tokens are listed."""

    @classmethod
    def of(cls, template: str, prompt: str, vocabulary: Vocabulary) -> Thinking | None:
        """Returns the reasoning that may precede the answer to a prompt, according to the chat template; None
        if there is none, or if the prompt already ends the reasoning. prompt: the rendered prompt."""
        marks = next((pair for pair in MARKS if pair[0] in template or pair[1] in template), None)
        if marks is None:
            return None
        begin, end = marks
        last = prompt.rstrip()
        if last.endswith(end):
            return None
        return cls(begin, end, last.endswith(begin), special_tokens(vocabulary, begin, end))

    @property
    def prose(self) -> str:
        """Returns the expression of a Lark terminal that matches any answer which does not begin with the
        mark that begins reasoning, also after white space."""
        return rf"/(.|\n)*/ & ~/[ \n]*{re.escape(self.begin)}(.|\n)*/"

    def before(self, constraint: Constraint, space: bool, ended: bool) -> Constraint:
        """Returns a constraint that allows reasoning first (and requires its end if the prompt has begun it),
        and then an answer that matches `constraint`. space: True if the text may begin with a space; ended:
        True if the text may end while it is reasoning."""
        answer = as_rule(constraint)
        if constraint.kind == "lark":
            answer = f"%lark {{\n{constraint.source}\n}}"
        begin, end = self._literal(self.begin), self._literal(self.end)
        text = r"/(.|\n)*/"
        first = f"{begin}?" if self.begun else begin
        opening = "" if self.begun else begin
        if self.tokens:
            thought = f"thought: {first} THOUGHT {end}\nTHOUGHT: {text}"
        else:
            thought = f"thought[lazy]: {opening} {text} {end}"
        optional, lead = "" if self.begun else "?", '" "? ' if space else ""
        rules = [
            f"start: {lead}(thought gap){optional} answer",
            thought,
            r"gap: /[ \n]*/",
            f"answer: {answer}",
        ]
        if ended:
            rules[0] += " | open"
            # One terminal: after `begin` alone, the lexer would take the longer `thought` only.
            rules.append(f"open: {first} {text}" if self.tokens else f"open: OPEN\nOPEN: {opening} {text}")
        return Constraint("lark", "\n".join(rules), constraint.param)

    def _literal(self, text: str) -> str:
        return f"<[{self.tokens[text]}]>" if text in self.tokens else json.dumps(text, ensure_ascii=False)


class ThinkingReader:
    """Splits an answer into its reasoning and the rest, as its text arrives. The parser `inner` splits the
    rest into text and tool calls; without it, the rest is text. White space around the reasoning belongs to
    neither."""

    def __init__(self, thinking: Thinking, inner: AnswerReader | None) -> None:
        self._marks, self._inner, self._held = thinking, inner, ""
        self._state: Literal["start", "thought", "gap", "answer"] = "start"
        self._has_thought = False

    @property
    def is_thinking(self) -> bool:
        """Returns True while the text that is being read is reasoning."""
        return self._state == "thought"

    def call_id(self) -> str:
        """Returns a new random id for the last tool call whose beginning the method `read` has yielded. The
        id has the form that the model's chat template accepts."""
        assert self._inner is not None
        return self._inner.call_id()

    def read(self, text: str, last: bool = False) -> Iterator[CallPiece]:
        """Adds text of the answer to the parser, and yields the parts that are complete: reasoning, text,
        beginnings of tool calls and their arguments. last: True if no more text will follow, so that text
        which was held back is yielded."""
        self._held += text
        if self._state == "start":
            self._begin(last)
        if self._state == "thought":
            yield from self._read_thought(last)
        if self._state == "gap":
            self._held = self._held.lstrip()
            self._state = "answer" if self._held else "gap"
        if self._state == "answer" or last:
            rest, self._held = self._held, ""
            if self._inner is not None:
                yield from self._inner.read(rest, last)
            elif rest:
                yield CallPiece("text", rest)

    def _begin(self, last: bool) -> None:
        stripped, mark = self._held.lstrip(), self._marks.begin
        if stripped.startswith(mark):
            self._held, self._state = stripped[len(mark) :], "thought"
        elif last or not mark.startswith(stripped):
            self._state = "thought" if self._marks.begun else "answer"

    def _read_thought(self, last: bool) -> Iterator[CallPiece]:
        text, mark = self._held, self._marks.end
        place = text.find(mark)
        if place >= 0:
            thought, self._held, self._state = text[:place].rstrip(), text[place + len(mark) :], "gap"
        else:
            keep = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
            thought = text if last else text[: len(text) - keep].rstrip()
            self._held = "" if last else text[len(thought) :]
            thought = thought.rstrip()
        if not self._has_thought:
            thought = thought.lstrip()
        if thought:
            self._has_thought = True
            yield CallPiece("reasoning", thought)


def template_variables(effort: str | None, enabled: bool | None) -> dict[str, Json]:
    """Returns variables for a chat template, under names that templates of several model families read:
    `enable_thinking` and `thinking`, which switch reasoning on or off, and `reasoning_effort`, any effort but
    "none"; {} without both parameters. `enabled` switches; without it, an effort other than "none" switches
    reasoning on, "none" off. effort: the request's field `reasoning_effort`; enabled: its field
    `enable_thinking`; None: absent."""
    variables: dict[str, Json] = {}
    if enabled is None and effort is not None:
        enabled = effort != "none"
    if effort not in (None, "none"):
        variables["reasoning_effort"] = effort
    if enabled is not None:
        variables |= {"enable_thinking": enabled, "thinking": enabled}
    return variables
