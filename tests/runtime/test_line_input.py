"""Tests of the input of a chat: messages of several lines, completion, history, and lines from a pipe."""

from __future__ import annotations

import os
import readline
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlcbuild_runtime.chat import line_input
from mlcbuild_runtime.chat.line_input import HISTORY_VARIABLE, history_path, messages, piped, typed


def read_from(*lines: str | None) -> tuple[Callable[[bool], str | None], list[bool]]:
    """Returns (function that returns these lines, then raises EOFError; list to which each of its calls
    appends whether a message was begun)."""
    left, continued = list(lines), list[bool]()

    def read(is_continued: bool) -> str | None:
        continued.append(is_continued)
        if not left:
            raise EOFError
        return left.pop(0)

    return read, continued


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], []),
        ([" a ", "", "b"], ["a", "", "b"]),
        (["a\\", " b\\", "c", "d"], ["a\n b\nc", "d"]),
        (["a\\"], ["a"]),
        (['"""', "a\\", "", "/b", '"""', "c"], ["a\\\n\n/b", "c"]),
        (['  """a', ' b"""  ', "c"], ["a\n b", "c"]),
        (['"""a"""'], ["a"]),
        (['"""', "a"], ["a"]),
        (["a\\", '"""'], ['a\n"""']),
        (['say """', "b"], ['say """', "b"]),
        (['say """ and\\', "b", "c"], ['say """ and\nb', "c"]),
        (["a\\", None, "b"], ["b"]),
        (['"""', "a", None, "b", '"""'], ["b"]),
    ],
)
def test_lines_are_joined_to_messages(lines: list[str | None], expected: list[str]) -> None:
    assert list(messages(read_from(*lines)[0])) == expected


def test_a_line_is_read_as_the_continuation_of_a_begun_message() -> None:
    read, continued = read_from("a\\", "b", '"""', "c", '"""', "d")
    list(messages(read))
    assert continued == [False, True, False, True, True, False, False]


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields the file of a chat's input history, in a directory that does not exist yet, and restores
    readline's settings afterwards."""
    monkeypatch.setenv(HISTORY_VARIABLE, str(tmp_path / "state" / "history"))
    before = readline.get_completer(), readline.get_completer_delims()
    readline.clear_history()
    yield tmp_path / "state" / "history"
    readline.set_completer(before[0])
    readline.set_completer_delims(before[1])
    readline.clear_history()


def test_tab_completes_first_words_and_the_words_after_them(
    history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ""
    monkeypatch.setattr(readline, "get_line_buffer", lambda: line)
    monkeypatch.setattr(readline, "get_begidx", lambda: line.rfind(" ") + 1)
    with typed({"": ("/set", "/stats", "/help"), "/set": ("seed", "stop")}):
        complete = readline.get_completer()
        assert complete is not None
        line = "/s"
        assert [complete("/s", state) for state in range(3)] == ["/set ", "/stats ", None]
        line = "/set se"
        assert [complete("se", state) for state in range(2)] == ["seed ", None]
        line = "/set seed s"
        assert complete("s", 0) is None


def test_the_history_is_kept_for_the_next_chat(history: Path) -> None:
    with typed({}):
        readline.add_history("one")
        assert not history.exists()
    readline.clear_history()
    with typed({}):
        assert readline.get_current_history_length() == 1 and readline.get_history_item(1) == "one"


def test_others_cannot_read_the_history_even_while_it_is_written(
    history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []

    def write(path: Path) -> None:
        modes.append(stat.S_IMODE(path.stat().st_mode))

    monkeypatch.setattr(readline, "write_history_file", write)
    with typed({}):
        pass
    assert modes == [0o600]


def test_a_history_that_cannot_be_written_ends_no_chat(history: Path) -> None:
    history.parent.write_text("a file")
    with typed({}) as read:
        assert read is line_input._read_typed


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(HISTORY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_path() == Path("/state/mlcbuild/chat_history")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert history_path() == tmp_path / ".local/state/mlcbuild/chat_history"
    monkeypatch.setenv(HISTORY_VARIABLE, "~/h")
    assert history_path() == tmp_path / "h"
    for nowhere in ("", "~nobody-of-this-name/h"):
        monkeypatch.setenv(HISTORY_VARIABLE, nowhere)
        assert history_path() is None


def test_a_typed_line_has_a_prompt_and_survives_bad_bytes(
    history: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[str | BaseException] = [
        "a",
        KeyboardInterrupt(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        "b",
        EOFError(),
    ]
    prompts: list[str] = []

    def read_line(prompt: str) -> str:
        prompts.append(prompt)
        assert signal.getitimer(signal.ITIMER_REAL)[1] == line_input.PATIENCE
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr("builtins.input", read_line)
    before = signal.getsignal(signal.SIGALRM)
    with typed({}) as read:
        assert [read(False), read(True), read(False)] == ["a", None, "b"]
        with pytest.raises(EOFError):
            read(False)
    assert prompts == ["> ", "... ", "> ", "> ", "> "]
    assert capsys.readouterr() == ("\n", "the input is not utf-8: invalid start byte\n")
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks the lines that a chat reads from a pipe: Windows line ends are removed, a last line may lack its
    end, and a line that is not valid UTF-8 is reported and skipped."""
    reading, writing = os.pipe()
    os.write(writing, "é\r\n\nb\n".encode() + b"\xff\nlast")
    with os.fdopen(reading, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with piped() as read:
            lines = [read(False) for _ in range(3)]
            os.close(writing)
            lines.append(read(False))
            with pytest.raises(EOFError):
                read(False)
    assert lines == ["é", "", "b", "last"]
    assert capsys.readouterr().err == "the input is not utf-8: invalid start byte\n"


def test_a_signal_is_noticed_while_a_pipe_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a signal's handler runs while the chat waits for a line of input: the handler itself writes
    that line to the pipe from which the chat reads."""
    reading, writing = os.pipe()
    before = signal.signal(signal.SIGALRM, lambda *_: os.write(writing, b"late\n"))
    wakeup = signal.set_wakeup_fd(-1)
    try:
        with os.fdopen(reading, encoding="utf-8") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            with piped() as read:
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                assert read(False) == "late"
        assert signal.set_wakeup_fd(-1) == -1, "the file descriptor of signals is restored"
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
