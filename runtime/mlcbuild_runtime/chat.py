"""Chats with a model in the terminal, or from piped input, over an engine in the same process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TextIO

from mlcbuild_format.errors import RequestError, ServingError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.openai import api

HELP = """\
/help              this text
/set name=value    temperature, top_p, top_k, min_p, seed, max_tokens, stop; system=TEXT
/stats             speed of the last answer, and totals
/metrics           what the engine has done so far
/regen             answer the last message again
/save FILE         write the conversation to a new file, as JSON
/reset             forget the conversation
/exit              leave (so does the end of the input)
A line that ends with \\ goes on in the next; so does everything between two lines of \"\"\".
Ctrl-C interrupts an answer."""

BLOCK = '"""'
"""A line with only this text begins and ends a message of several lines."""
PATIENCE = 0.5
"""Seconds after which a wait for the model is repeated, so that a signal that arrives just before the wait is
noticed."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FIXED = ("messages", "stream", "logprobs", "top_logprobs", "model", "n", "tools", "tool_choice")
"""Request fields that this chat sets itself or does not support."""


@dataclass
class _Stats:
    """Statistics of the last answer; times are wall-clock seconds."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    answer_tokens: int = 0
    decode_seconds: float = 0.0
    total_tokens: int = 0

    def __str__(self) -> str:
        if not self.answer_tokens:
            return "no answer yet"
        prefill = self.prompt_tokens / max(self.prefill_seconds, 1e-9)
        text = (
            f"prompt {self.prompt_tokens} tokens, first token after {self.prefill_seconds:.2f} s"
            f" ({prefill:.0f} tok/s); answer {self.answer_tokens} tokens"
        )
        if self.answer_tokens > 1:
            text += f" ({(self.answer_tokens - 1) / max(self.decode_seconds, 1e-9):.1f} tok/s)"
        return f"{text}; {self.total_tokens} tokens answered in all"


@dataclass
class _Session:
    running: Engine
    out: TextIO
    terminal: bool
    history: list[Json] = field(default_factory=list)
    settings: dict[str, Json] = field(default_factory=dict)
    stats: _Stats = field(default_factory=_Stats)
    system: str = ""
    failed: bool = False
    """True if a message could not be answered."""

    def call(self, messages: list[Json], settings: dict[str, Json]) -> api.ChatCall:
        """Returns the checked request, by the rules of the HTTP API. Raises RequestError."""
        head: list[Json] = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Json] = {**settings, "messages": head + messages}
        return api.chat_call(body, self.running.manifest.serving)

    def answer(self, text: str) -> None:
        """Sends a message, and prints the answer as it arrives. Raises RequestError."""
        messages: list[Json] = [*self.history, {"role": "user", "content": text}]
        call = self.call(messages, self.settings)
        prompt = self.running.tokenizer.chat(call.messages, call.template_options)
        options, grammars = call.options, self.running.grammars
        grammar = options.constraint
        constraint = None if grammar is None else grammars.compiled(grammar, message=True)
        request = Request(
            tuple(prompt),
            options.max_tokens,
            options.sampling,
            options.stop,
            message=True,
            constraint=constraint,
        )
        self.stats = _Stats(len(prompt), total_tokens=self.stats.total_tokens)
        texts = []
        try:
            with contextlib.closing(self._events(request)) as events:
                for event in events:
                    texts.append(event.text)
                    self.out.write(_visible(event.text) if self.terminal else event.text)
                    self.out.flush()
        except KeyboardInterrupt:
            if not self.terminal:
                raise
            self.out.write(" (interrupted)")
        self.out.write("\n")
        self.out.flush()
        self.history = [*messages, {"role": "assistant", "content": "".join(texts)}]

    def _events(self, request: Request) -> Generator[Event, None, None]:
        """Yields the events of an answer; closing the generator ends the answer. Raises ServingError if it
        fails."""
        events: SimpleQueue[Event] = SimpleQueue()
        start = time.perf_counter()
        ticket = self.running.submit(request, events.put)
        try:
            while True:
                try:
                    event = events.get(timeout=PATIENCE)
                except Empty:
                    continue
                if event.error is not None:
                    raise event.error
                self._count(event, time.perf_counter() - start)
                yield event
                if event.last:
                    return
        finally:
            ticket.cancel()

    def _count(self, event: Event, seconds: float) -> None:
        stats = self.stats
        if event.tokens == 1:
            stats.prefill_seconds = seconds
        stats.answer_tokens = event.tokens
        stats.decode_seconds = seconds - stats.prefill_seconds
        stats.total_tokens += 1

    def command(self, line: str) -> bool:
        """Executes a line that begins with a slash. Returns false to leave the chat. Raises ServingError."""
        word, _, rest = line.partition(" ")
        actions: dict[str, Callable[[], str]] = {
            "/help": lambda: HELP,
            "/stats": lambda: str(self.stats),
            "/metrics": self._metrics,
            "/regen": self._regen,
            "/save": lambda: self._save(rest.strip()),
            "/reset": self._reset,
            "/set": lambda: self._set(rest),
        }
        if word in ("/exit", "/quit"):
            return False
        action = actions.get(word)
        text = action() if action is not None else f"unknown command {word}; /help lists them"
        if text:
            self.out.write(f"{text}\n")
            self.out.flush()
        return True

    def _metrics(self) -> str:
        shown = {name: value for name, value in asdict(self.running.state()).items() if name != "alive"}
        width = max(map(len, shown))
        return "\n".join(f"{name.replace('_', ' '):<{width}}  {value}" for name, value in shown.items())

    def _regen(self) -> str:
        """Answers the last message again; returns a text to print. Raises RequestError."""
        match self.history[-2:]:
            case [{"role": "user", "content": str(text)}, answer]:
                del self.history[-2:]
                try:
                    self.answer(text)
                except ServingError:
                    self.history += [{"role": "user", "content": text}, answer]
                    raise
                return ""
            case _:
                return "there is no message to answer again"

    def _save(self, name: str) -> str:
        if not name:
            return "usage: /save FILE"
        head: list[Json] = [{"role": "system", "content": self.system}] if self.system else []
        model = self.running.manifest.name
        document = {"model": model, **self.settings, "messages": head + self.history}
        try:
            with Path(name).open("x", encoding="utf-8") as file:
                json.dump(document, file, indent=2, ensure_ascii=False)
                file.write("\n")
        except OSError as error:
            return f"{name} cannot be written: {error.strerror}"
        return f"{name}: {len(self.history)} messages"

    def _reset(self) -> str:
        self.history = []
        return "the conversation is forgotten"

    def _set(self, text: str) -> str:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name:
            return "usage: /set name=value, for example /set temperature=0.7"
        if name == "system":
            self.system = value
            return "system message set" if value else "system message removed"
        if name in FIXED:
            return f"{name} cannot be set here"
        changed = {**self.settings, name: _value(value)}
        try:
            self.call([{"role": "user", "content": ""}], changed)
        except RequestError as error:
            return str(error)
        self.settings = changed
        return f"{name} = {json.dumps(changed[name])}"


def _visible(text: str) -> str:
    """Returns a model's text with control characters, except line breaks and tabs, escaped."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def _value(text: str) -> Json:
    """Returns a setting's value: JSON where it is JSON, text otherwise, and None, which removes the setting,
    for ""."""
    try:
        setting: Json = json.loads(text) if text else None
    except ValueError:
        return text
    return setting


def chat(path: Path | str, threads: int | None = None) -> int:
    """Chats with the bundle in directory `path` until the input ends; returns the exit code.

    On a terminal there is a prompt; otherwise every line of input is a message or a command, and only answers
    are written. The exit code is 1 if a message of such an input could not be answered.
    """
    from mlcbuild_runtime import untrusted

    try:
        executor, tokenizer = untrusted.load(path, threads)
    except ServingError as error:
        sys.stderr.write(f"mlcbuild chat: {error}\n")
        return error.exit_code
    running = Engine(executor, tokenizer, EngineOptions(max_batch=1)).start()
    try:
        return _converse(_Session(running, sys.stdout, sys.stdin.isatty() and sys.stdout.isatty()))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader is gone; what is left in the buffer must go somewhere when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        running.close()


def _converse(session: _Session) -> int:
    terminal = session.terminal
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() a history and editing)
        session.out.write(f"{session.running.manifest.name}: /help lists the commands\n")
    for line in _messages(_typed() if terminal else _piped()):
        try:
            if line.startswith("/") and "\n" not in line:
                if not session.command(line):
                    break
            elif line:
                session.answer(line)
        except ServingError as error:
            session.failed = True
            sys.stderr.write(f"{error}\n")
    return 1 if session.failed and not terminal else 0


def _messages(lines: Iterator[str | None]) -> Iterator[str]:
    """Yields messages, joined from continued lines, without surrounding spaces; a None drops what was
    begun."""
    begun: list[str] = []
    block = False
    for line in lines:
        if line is None:
            begun, block = [], False
        elif line.strip() == BLOCK:
            block = not block
            if not block:
                yield "\n".join(begun).strip()
                begun = []
        elif block or line.endswith("\\"):
            begun.append(line if block else line[:-1])
        else:
            yield "\n".join([*begun, line]).strip()
            begun = []
    if begun:
        yield "\n".join(begun).strip()


def _typed() -> Iterator[str | None]:
    """Yields lines from a terminal; None for Ctrl-C, which clears the typed text."""
    while True:
        try:
            with _alarms():
                line = input("> ")
            yield line
        except EOFError:
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            yield None
        except UnicodeDecodeError as error:
            sys.stderr.write(f"the input is not {error.encoding}: {error.reason}\n")


@contextlib.contextmanager
def _alarms() -> Iterator[None]:
    """Ends every wait for a key after PATIENCE seconds, which input() then repeats, so that a Ctrl-C that
    arrives between Python's last check for signals and the wait is noticed."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _piped() -> Iterator[str]:
    """Yields the lines of standard input.

    A signal that arrives between Python's last check and a blocking call would be noticed only after the
    call. Here it also makes a pipe readable, for which the call waits, too.
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
    """Yields a file descriptor that becomes readable with every signal."""
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
