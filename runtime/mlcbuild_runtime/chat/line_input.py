"""Reads messages: typed on a terminal, with a history and completion, or piped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

BLOCK = '"""'
"""The text with which a user begins and ends a chat message of several lines: three double quotation
marks."""
PATIENCE = 0.5
"""Seconds after which waiting for a key press on the terminal is interrupted and begun again, so that a
signal that arrives just before the wait is noticed."""
HISTORY_VARIABLE = "MLCBUILD_CHAT_HISTORY"
KEPT_LINES = 1000
"""Number of lines of the input history that are kept between command-line chats."""

ReadLine = Callable[[bool], str | None]
"""Function that returns the next line of input, without its line break. The argument is True if the line
continues a message, for which a terminal shows another prompt. It returns None to drop the message that was
begun, and raises EOFError at the end of the input."""


def messages(read: ReadLine) -> Iterator[str]:
    """Yields the user's chat messages, each without spaces and line breaks at its ends, until `read`, the
    function that returns the next line, raises EOFError; a message that was begun is yielded then, too. If
    `read` returns None, it is dropped.

    A line that ends with a backslash is joined with the next. If a message begins with three quotation marks,
    its lines up to one that ends with three are joined, and backslashes at their ends stay. The other
    backslashes and these quotation marks are removed; line breaks stay. An empty line is an empty message.
    """
    begun: list[str] = []
    in_block = False
    while True:
        try:
            line = read(bool(begun) or in_block)
        except EOFError:
            break
        if line is None:
            begun, in_block = [], False
            continue
        if not in_block and not begun and line.lstrip().startswith(BLOCK):
            in_block, line = True, line.lstrip().removeprefix(BLOCK)
            if not line.strip():
                continue
        if in_block:
            in_block = not line.rstrip().endswith(BLOCK)
            begun.append(line if in_block else line.rstrip().removesuffix(BLOCK))
            continues = in_block
        else:
            continues = line.endswith("\\")
            begun.append(line.removesuffix("\\"))
        if not continues:
            yield "\n".join(begun).strip()
            begun = []
    if begun:
        yield "\n".join(begun).strip()


@contextlib.contextmanager
def typed(words: Mapping[str, Sequence[str]]) -> Iterator[ReadLine]:
    """Returns a context that yields a function which reads lines from a terminal, with a history, saved at
    the end, and completion by Tab (neither for a Python without readline). The function returns None after
    Ctrl-C, which discards the message that was begun, and raises EOFError at the end of the input.

    words: completions: "" -> words with which a line may begin, first word of a line -> words that may follow
    it.
    """
    with contextlib.suppress(ImportError):
        _prepare_readline(words)
    try:
        yield _read_typed
    finally:
        _save_history()


def _read_typed(continued: bool) -> str | None:
    while True:
        try:
            with _alarms():
                return input("... " if continued else "> ")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            return None
        except UnicodeDecodeError as error:
            sys.stderr.write(f"the input is not {error.encoding}: {error.reason}\n")


def _prepare_readline(words: Mapping[str, Sequence[str]]) -> None:
    """Sets up history and completion of lines for Python's input(). words: completions for Tab, "" -> words
    with which a line may begin, first word of a line -> words that may follow it. Raises ImportError for a
    Python without readline."""
    import readline

    def complete(text: str, state: int) -> str | None:
        before = readline.get_line_buffer()[: readline.get_begidx()].split()
        matching = [word for word in words.get(" ".join(before), ()) if word.startswith(text)]
        return f"{matching[state]} " if state < len(matching) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    is_editline = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_editline else "tab: complete")
    if path := history_path():
        with contextlib.suppress(OSError):
            readline.read_history_file(path)


def _save_history() -> None:
    """Writes the last 1000 lines of the input history to the file of `history_path`, for later chats. If that
    is impossible, a chat continues without a message."""
    path = history_path()
    readline = sys.modules.get("readline")
    if path is None or readline is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.set_history_length(KEPT_LINES)
        readline.write_history_file(path)


def history_path() -> Path | None:
    """Returns the path of the file with the chat's input history: $MLCBUILD_CHAT_HISTORY, or a file in the
    user's state directory; None if the variable is set to "", or for a user without a home directory."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    directory = base if base.is_absolute() else "~/.local/state"
    chosen = os.environ.get(HISTORY_VARIABLE, f"{directory}/mlcbuild/chat_history")
    try:
        return Path(chosen).expanduser() if chosen else None
    except RuntimeError:
        return None


@contextlib.contextmanager
def _alarms() -> Iterator[None]:
    """Returns a context in which a timer interrupts, every PATIENCE seconds, the system call with which
    Python's input() waits for a key press; input() then repeats it. So a Ctrl-C that arrives between Python's
    last check for signals and the system call is noticed. Must be used on the main thread, which alone may
    set signal handlers."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def piped() -> Iterator[ReadLine]:
    """Returns a context that yields a function which returns the next line of standard input, and raises
    EOFError at its end."""
    lines = _piped_lines()

    def read(_continued: bool) -> str:
        for line in lines:
            return line
        raise EOFError

    with contextlib.closing(lines):
        yield read


def _piped_lines() -> Generator[str, None, None]:
    """Yields the lines of standard input without their line breaks. A line that cannot be decoded is left
    out, with a message on stderr.

    A signal that arrives between Python's last check and a blocking call would be noticed only after the
    call. So every signal also makes a pipe readable, and the call waits for input or that pipe.
    """
    source, encoding, left = sys.stdin.fileno(), sys.stdin.encoding, b""
    with _signals() as signalled:
        while True:
            ready, _, _ = select.select([source, signalled], [], [])
            if source not in ready:
                os.read(signalled, 1)  # the signal's handler has run by now, and may have raised
                continue
            data = os.read(source, 1 << 16)
            *lines, left = (left + data).split(b"\n")
            for line in lines if data else [left] if left else []:
                try:
                    yield line.removesuffix(b"\r").decode(encoding)
                except UnicodeDecodeError as error:
                    sys.stderr.write(f"the input is not {error.encoding}: {error.reason}\n")
            if not data:
                return


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Returns a context that yields a file descriptor from which one byte can be read for every signal that
    Python handles, so that it becomes readable; outside of the main thread it never does."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    before = None
    with contextlib.suppress(ValueError):  # signals belong to the main thread
        before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    try:
        yield readable
    finally:
        if before is not None:
            signal.set_wakeup_fd(before)
        os.close(readable)
        os.close(writable)
