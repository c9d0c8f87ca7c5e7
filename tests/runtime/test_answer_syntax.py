"""Tests of the syntax of a chat's answers: which one a template implies, what it constrains and splits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from mlcbuild_format.bundle import Serving
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai import api
from mlcbuild_runtime.openai.answer_syntax import ChannelSyntax, MarkedSyntax, answer_syntax
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.call_syntax import Reader
from mlcbuild_runtime.openai.harmony import HarmonyReader
from mlcbuild_runtime.openai.reasoning import ThinkingReader

from .grammars import TOKENIZERS
from .tool_forms import HERMES, NATIVE, tool

VOCABULARY = TOKENIZERS["tools"].vocabulary
THINKS = NATIVE + "<think></think>"
CHANNELS = "<|start|>assistant<|channel|>analysis<|message|><|end|><|call|><|return|>"


def syntax(template: str, prompt: str = "") -> Any:
    tokenizer: Any = SimpleNamespace(template=SimpleNamespace(source=template), vocabulary=VOCABULARY)
    return answer_syntax(tokenizer, Form.of(template, VOCABULARY), prompt)


def call(**fields: Json) -> api.ChatCall:
    messages: list[Json] = [{"role": "user", "content": "x"}]
    return api.chat_call({"messages": messages, **fields}, Serving())


FUNCTION: Json = tool(parameters={"type": "object"})
FORMAT: Json = {"type": "json_object"}


def test_templates_with_channels_are_told_from_those_with_marks() -> None:
    assert isinstance(syntax(CHANNELS), ChannelSyntax)
    assert syntax(CHANNELS).shown(call()) == syntax(CHANNELS).channels.tokens
    marked = syntax(THINKS)
    assert isinstance(marked, MarkedSyntax) and marked.thinking is not None
    assert syntax(NATIVE).thinking is None


def test_a_prompt_that_ends_the_reasoning_has_none_to_come() -> None:
    assert syntax(THINKS, "<think>\n\n</think>\n\n").thinking is None
    assert syntax(THINKS, "hi<think>\n").thinking.begun and not syntax(THINKS, "hi").thinking.begun


@pytest.mark.parametrize(
    ("template", "fields", "kind"),
    [
        (NATIVE, {}, None),
        (NATIVE, {"tools": [FUNCTION]}, Reader),
        (NATIVE, {"response_format": FORMAT}, None),
        (THINKS, {}, ThinkingReader),
        (THINKS, {"tools": [FUNCTION]}, ThinkingReader),
        (CHANNELS, {}, HarmonyReader),
        (CHANNELS, {"tools": [FUNCTION]}, HarmonyReader),
    ],
)
def test_only_answers_with_parts_have_a_parser(template: str, fields: dict[str, Json], kind: Any) -> None:
    make = syntax(template).reader(call(**fields))
    assert (None if make is None else type(make())) is kind


def test_a_client_may_want_the_reasoning_in_the_text() -> None:
    whole = replace(call(), splits_reasoning=False)
    assert syntax(THINKS).reader(whole) is syntax(CHANNELS).reader(whole) is None
    tools = replace(call(tools=[FUNCTION]), splits_reasoning=False)
    make = syntax(THINKS).reader(tools)
    assert make is not None and isinstance(make(), Reader)


def test_free_answers_have_no_constraint_and_others_begin_after_the_reasoning() -> None:
    for template in (NATIVE, THINKS):
        assert syntax(template).constraint(call(), False) is None
    formatted = call(response_format=FORMAT)
    plain, after = (syntax(template).constraint(formatted, False) for template in (NATIVE, THINKS))
    assert plain is not None and after is not None and plain != after
    assert "think" in after.source and "think" not in plain.source


def test_marks_of_calls_appear_in_the_text_if_there_are_tools() -> None:
    mistral = syntax("{{ tools }}[TOOL_CALLS]name[ARGS]")
    assert set(mistral.shown(call(tools=[FUNCTION]))) == {"[TOOL_CALLS]", "[ARGS]"}
    assert mistral.shown(call()) == {} and HERMES.tokens == {}
