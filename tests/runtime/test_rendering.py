"""Tests of showing answers on a terminal: which characters are escaped, and where Markdown may be divided."""

from __future__ import annotations

import io

import pytest
from mlcbuild_runtime.chat.chat_model import AnswerPart
from mlcbuild_runtime.chat.rendering import markdown, plain_printer, printer, split, visible
from rich.console import Console


def test_control_characters_are_shown() -> None:
    assert visible("a\tb\nc\x1b[2J\r\x9b\x00") == "a\tb\nc\\x1b[2J\\r\\x9b\\x00"
    assert visible("ünïcode 東京 🙂") == "ünïcode 東京 🙂"


@pytest.mark.parametrize(("escape", "text"), [(True, "a\\x1b\n"), (False, "a\x1b\n")])
def test_plain_answers_end_with_a_line_break(escape: bool, text: str) -> None:
    out = io.StringIO()
    with plain_printer(out, escape)() as show:
        show(AnswerPart("a"))
        show(AnswerPart("\x1b"))
    assert out.getvalue() == text
    empty = io.StringIO()
    with plain_printer(empty, escape)():
        pass
    assert empty.getvalue() == ""


REASONED = [
    AnswerPart(" two", True),
    AnswerPart(" and\n\nthree", True),
    AnswerPart("**five**"),
    AnswerPart("!"),
]


@pytest.mark.parametrize(
    ("escape", "text"),
    [(True, "[reasoning]  two and\n\nthree\n[answer] **five**!\n"), (False, "**five**!\n")],
)
def test_reasoning_is_shown_apart_on_a_terminal_only(escape: bool, text: str) -> None:
    out = io.StringIO()
    with plain_printer(out, escape)() as show:
        for part in REASONED:
            show(part)
    assert out.getvalue() == text


def test_reasoning_is_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    with printer(out)() as show:
        for part in REASONED:
            show(part)
    text = out.getvalue()
    assert "\x1b[2mtwo and\x1b[0m" in text and "\x1b[2mthree\x1b[0m" in text
    assert "\x1b[1mfive\x1b[0m!" in text


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", ""),
        ("one", ""),
        ("one\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n \t\ntwo\n\n", "one\n \t\ntwo\n\n"),
        ("```\na\n\nb", ""),
        ("```py\na\n\nb\n```\n\nc", "```py\na\n\nb\n```\n\n"),
        ("~~~\n```\n\n~~~\n\nc", "~~~\n```\n\n~~~\n\n"),
        ("````\n```\n\n````\n\nc", "````\n```\n\n````\n\n"),
        ("```\n``` no end\n\nb", ""),
        ("   ```\na\n\n   ```\n\nb", "   ```\na\n\n   ```\n\n"),
        ("    ```\n\nb", "    ```\n\n"),
    ],
)
def test_blocks_are_cut_at_empty_lines_outside_of_code(text: str, complete: str) -> None:
    assert split(text) == (complete, text.removeprefix(complete))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a List<int> and <b>bold</b>", "a List<int> and <b>bold</b>"),
        ("<think>\nwhy\n</think>", "<think> why </think>"),
        ("<div>x</div>\n\n**y**", "<div>x</div>\n\ny"),
    ],
)
def test_markup_in_an_answer_is_shown_as_written(text: str, shown: str) -> None:
    out = io.StringIO()
    Console(file=out, width=60).print(markdown(text))
    assert "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip() == shown
