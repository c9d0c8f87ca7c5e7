"""Tests of a chat's messages, settings and commands, with a model that answers from a script."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format.errors import EngineError, RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.chat.chat_model import AnswerPart, Speed
from mlcbuild_runtime.chat.chat_options import ChatOptions
from mlcbuild_runtime.chat.conversation import COMMANDS, HELP, UNANSWERED, Conversation, _value, converse
from mlcbuild_runtime.chat.rendering import plain_printer


class Scripted:
    """A model that answers with the number of messages, in two parts; a message "fail" raises an error,
    "stop" the KeyboardInterrupt of Ctrl-C after the first part, and "think" gives reasoning without an
    answer."""

    name, greeting = "scripted", "it counts"

    def __init__(self) -> None:
        self.requests: list[tuple[list[Json], dict[str, Json]]] = []
        self.speed = Speed()

    def check(self, messages: list[Json], settings: Mapping[str, Json]) -> None:
        if "colour" in settings:
            raise RequestError("unknown field 'colour'")

    def answer(self, messages: list[Json], settings: Mapping[str, Json]) -> Generator[AnswerPart, None, None]:
        self.requests.append((messages, dict(settings)))
        last: Any = messages[-1]
        if last["content"] == "fail":
            raise EngineError("it has failed")
        yield AnswerPart("it counts them", is_reasoning=True)
        if last["content"] == "think":
            return
        yield AnswerPart(f"{len(messages)} ")
        if last["content"] == "stop":
            raise KeyboardInterrupt
        yield AnswerPart("messages")
        self.speed = Speed(prompt_tokens=len(messages), answer_tokens=2)

    def metrics(self) -> Mapping[str, object]:
        return {"answer_tokens": 7, "pages": 64}


def conversation(terminal: bool = False) -> tuple[Conversation, Scripted, io.StringIO]:
    model, out = Scripted(), io.StringIO()
    return Conversation(model, out, plain_printer(out, escape=False), terminal), model, out


def run(chat: Conversation, *lines: str) -> list[bool]:
    return [chat.command(line) for line in lines]


def test_an_answer_is_shown_and_remembered() -> None:
    chat, model, out = conversation()
    chat.answer("a")
    chat.system = "s"
    chat.answer("b")
    assert out.getvalue() == "1 messages\n4 messages\n"
    assert chat.history == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "1 messages"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "4 messages"},
    ]
    assert model.requests[1][0] == [{"role": "system", "content": "s"}, *chat.history[:3]]
    assert chat.total_tokens == 4


def test_reasoning_without_an_answer_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    chat, _, out = conversation()
    chat.answer("think")
    assert capsys.readouterr().err == UNANSWERED and out.getvalue() == ""
    assert chat.history[1] == {"role": "assistant", "content": ""}


def test_a_message_that_fails_is_not_remembered() -> None:
    chat, _, _ = conversation()
    with pytest.raises(EngineError):
        chat.answer("fail")
    assert chat.history == []


def test_ctrl_c_keeps_the_begun_answer_on_a_terminal_only() -> None:
    with pytest.raises(KeyboardInterrupt):
        conversation()[0].answer("stop")
    chat, _, out = conversation(terminal=True)
    chat.answer("stop")
    assert out.getvalue() == "1 \n(interrupted)\n"
    assert chat.history[1] == {"role": "assistant", "content": "1 "}


def test_settings_are_json_or_text_and_are_checked() -> None:
    chat, model, out = conversation()
    run(chat, "/set temperature 0.5", "/set stop=x y", "/set seed=", "/set top_k=[1]", "/set colour=red")
    run(chat, "/set stream=true", "/set", "/set top_p", "/set system Be kind", "/set system=")
    assert chat.settings == {"temperature": 0.5, "stop": "x y", "seed": None, "top_k": [1]}
    assert _value("NaN") == "NaN" and _value("2e0") == 2, "what is no JSON is text"
    usage = "usage: /set name value, for example /set temperature 0.7"
    assert out.getvalue().splitlines() == [
        *("temperature = 0.5", 'stop = "x y"', "seed = null", "top_k = [1]", "unknown field 'colour'"),
        *("stream cannot be set here", usage, usage, "system message set", "system message removed"),
    ]
    chat.answer("a")
    assert model.requests[0][1] == chat.settings


def test_the_last_message_is_answered_again() -> None:
    chat, model, out = conversation()
    run(chat, "/regen")
    assert out.getvalue() == "there is no message to answer again\n"
    chat.answer("a")
    chat.answer("b")
    run(chat, "/regen")
    assert [messages for messages, _ in model.requests[1:]] == [chat.history[:3]] * 2
    assert len(chat.history) == 4
    chat.history[2] = {"role": "user", "content": "fail"}
    before = list(chat.history)
    with pytest.raises(EngineError):
        run(chat, "/regen")
    assert chat.history == before, "the old answer stays where the new one fails"


def test_commands_that_show(tmp_path: Path) -> None:
    chat, _, out = conversation()
    assert run(chat, "/stats", "/metrics", "/help", "/nonsense x", "/exit") == [True] * 4 + [False]
    assert run(chat, "/quit") == [False]
    expected = f"no answer yet\nanswer tokens  7\npages          64\n{HELP}\n"
    assert out.getvalue() == f"{expected}unknown command /nonsense; /help lists them\n"
    chat.answer("a")
    out.truncate(0)
    out.seek(0)
    run(chat, "/stats", "/reset", "/clear")
    forgotten = "the conversation is forgotten\n"
    assert out.getvalue() == f"prompt 1 tokens; answer 2 tokens; 2 tokens answered in all\n{forgotten * 2}"
    assert chat.history == []


def test_a_server_may_report_no_speed() -> None:
    chat, model, out = conversation()
    chat.answer("a")
    model.speed = Speed()
    run(chat, "/stats")
    assert out.getvalue() == "1 messages\nthe speed of the last answer is not reported\n"


def test_every_command_is_known() -> None:
    chat, _, out = conversation()
    for command in COMMANDS:
        chat.command(command)
    assert "unknown" not in out.getvalue()


def test_a_conversation_is_saved_to_a_new_file(tmp_path: Path) -> None:
    chat, _, out = conversation()
    run(chat, "/set system=é", "/set max_tokens=3")
    chat.answer("a")
    run(chat, f"/save {tmp_path}/a.json ", f"/save {tmp_path}/a.json", "/save")
    assert out.getvalue().splitlines()[3:] == [
        f"{tmp_path}/a.json: 2 messages",
        f"{tmp_path}/a.json cannot be written: File exists",
        "usage: /save FILE",
    ]
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    messages = [{"role": "system", "content": "é"}, *chat.history]
    assert json.loads(text) == {"model": "scripted", "max_tokens": 3, "messages": messages}
    assert "é" in text


def test_no_file_name_and_no_text_ends_the_chat(tmp_path: Path) -> None:
    chat, _, out = conversation()
    chat.system, deep = "\udcff", "[" * 100_000
    run(chat, "/save a\0b", f"/save {tmp_path}/a.json", f"/set stop {deep}")
    assert out.getvalue().startswith("a file name cannot contain the character NUL\n")
    assert json.loads((tmp_path / "a.json").read_text())["messages"][0]["content"] == "\udcff"
    assert chat.settings == {"stop": deep}


def piped_chat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, options: ChatOptions) -> Scripted:
    """Runs a terminal chat to its end, with a file that contains `text` as its standard input. Returns the
    scripted model that answered; its attribute `code` is the chat's exit code."""
    (tmp_path / "input").write_text(text)
    model = Scripted()
    with (tmp_path / "input").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        model.code = converse(model, options)  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize(
    ("text", "code", "contents"),
    [
        ("a\n/set seed 1\n\nb\n/exit\nc\n", 0, ["a", "b"]),
        ("fail\na\n", 1, ["fail", "a"]),
        ('"""\n/exit\nb\n"""\n', 0, ["/exit\nb"]),
    ],
)
def test_a_piped_chat(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    code: int,
    contents: list[str],
) -> None:
    model = piped_chat(monkeypatch, tmp_path, text, ChatOptions(system="s", temperature=0.5))
    last_messages: list[Any] = [messages[-1] for messages, _ in model.requests]
    assert [message["content"] for message in last_messages] == contents
    assert model.requests[0] == (
        [{"role": "system", "content": "s"}, {"role": "user", "content": contents[0]}],
        {"temperature": 0.5},
    )
    assert model.code == code  # type: ignore[attr-defined]
    assert capsys.readouterr().err == ("it has failed\n" if code else "")


def test_one_message_of_the_command_line_or_of_the_whole_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for prompt, content in (("a\\", "a\\"), ("-", "/exit\nb\n")):
        model = piped_chat(monkeypatch, tmp_path, "/exit\nb\n", ChatOptions(prompt=prompt, max_tokens=1))
        assert model.requests == [([{"role": "user", "content": content}], {"max_tokens": 1})]
    assert capsys.readouterr().out == "1 messages\n" * 2


def test_an_empty_input_is_no_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = piped_chat(monkeypatch, tmp_path, " \n", ChatOptions(prompt="-"))
    assert (model.code, model.requests) == (2, [])  # type: ignore[attr-defined]
    message = "mlcbuild-chat: '-': standard input is empty: pipe the message into it\n"
    assert capsys.readouterr() == ("", message)
