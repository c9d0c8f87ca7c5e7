"""Tests of syntaxes of tool calls: which one a chat template implies, and the texts that follow from its
fields."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from mlcbuild_runtime.openai.call_forms import SYNTAXES, Form, NamedCall, special_tokens
from mlcbuild_runtime.text.vocabulary import Vocabulary

from tests.runtime.tool_forms import FORMS, HERMES


class Marks:
    """A vocabulary of special tokens, which have no bytes, and ordinary ones, which have those of their
    names. Tokens are numbered from 100."""

    def __init__(self, special: tuple[str, ...], ordinary: tuple[str, ...] = ()) -> None:
        self._special, self._ordinary = special, ordinary

    def token_id(self, name: str) -> int | None:
        names = [*self._special, *self._ordinary]
        return 100 + names.index(name) if name in names else None

    def token_bytes(self, token: int) -> bytes:
        names = [*self._special, *self._ordinary]
        name = names[token - 100]
        return b"" if name in self._special else name.encode()


def marks(*special: str, ordinary: tuple[str, ...] = ()) -> Vocabulary:
    return cast(Vocabulary, Marks(special, ordinary))


@pytest.mark.parametrize("index", range(len(SYNTAXES)))
def test_a_template_with_the_texts_of_a_syntax_has_that_syntax(index: int) -> None:
    """Checks that the table of tool call syntaxes is in the right order: a chat template with the
    characteristic texts of a row has that row's syntax, and not the one of an earlier row."""
    syntax = SYNTAXES[index]
    form = Form.of("{{ tools }}" + " ".join(syntax.texts), marks(*syntax.special))
    assert form.lead == syntax.form.lead and form.by_name == syntax.form.by_name and form.native
    assert form.tokens == {name: 100 + i for i, name in enumerate(syntax.special)}
    assert not Form.of(" ".join(syntax.texts)).native, "the template describes no tools"


def test_a_mark_that_is_no_special_token_may_be_left_out() -> None:
    llama = '{{ tools }}"parameters"'
    assert Form.of(llama, marks("<|python_tag|>")).first == "<|python_tag|>"
    assert Form.of(llama, marks(ordinary=("<|python_tag|>",))).first == Form.of(llama).first == ""
    assert special_tokens(marks("a", ordinary=("b",)), "a", "b", "c") == {"a": 100}


def test_the_texts_of_a_call() -> None:
    plain = Form(lead="<", end=">", key="input")
    assert plain.write('f"', {"a": "é"}) == '<{"name": "f\\"", "input": {"a": "é"}}>'
    assert (plain.mark, plain.tail) == ("<", "}>")
    numbered = Form(first="[", by_name=NamedCall("=", before="call ", numbered=True))
    assert (numbered.mark, numbered.head("f"), numbered.tail) == ("[", "call f:0=", "")
    tagged: dict[str, Any] = {"a": "plain", "b": [1, "x"]}
    text = FORMS["qwen coder"].write("f", tagged)
    assert "<parameter=a>\nplain\n</parameter>" in text and '<parameter=b>\n[1, "x"]\n</parameter>' in text


def test_rules_name_special_tokens_and_quote_the_rest() -> None:
    form = Form(tokens={"<a>": 7, "<b>": 9})
    assert form.literal('x<a>"<b>') == '"x" <[7]> "\\"" <[9]>'
    numbered = Form(by_name=NamedCall("<a>", numbered=True), tokens={"<a>": 7})
    assert numbered.head_rule("f") == '"f:" /[0-9]{1,3}/ <[7]>'


def test_ids_are_what_a_template_takes() -> None:
    """Checks the form of tool call ids: Mistral's templates accept only nine letters and digits."""
    assert re.fullmatch("[a-z0-9]{9}", FORMS["mistral"].call_id())
    assert HERMES.call_id().startswith("call_")
