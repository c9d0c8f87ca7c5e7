"""A conversation in the terminal, over an engine in the same process. Works piped, too."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

from mlcbuild_runtime import api
from mlcbuild_runtime.engine import Engine
from mlcbuild_runtime.errors import RequestError, ServingError
from mlcbuild_runtime.fields import Json
from mlcbuild_runtime.request import Event, Request

HELP = """\
/help              this text
/set name=value    temperature, top_p, top_k, min_p, seed, max_tokens, stop; system=TEXT
/stats             speed of the last answer, and totals
/reset             forget the conversation
/exit              leave (so does the end of the input)
Ctrl-C interrupts an answer."""

FIXED = ("messages", "stream", "logprobs", "top_logprobs", "model", "n", "tools", "tool_choice")
"""Fields that this chat sets itself, or has no use for."""


@dataclass
class _Stats:
    """Of the last answer; seconds by the clock."""

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
    """A message could not be answered."""

    def call(self, messages: list[Json], settings: dict[str, Json]) -> api.ChatCall:
        """The checked request, by the rules of the HTTP API."""
        head: list[Json] = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Json] = {**settings, "messages": head + messages}
        return api.chat_call(body, self.running.model.manifest.serving)

    def answer(self, text: str) -> None:
        """Asks, and prints the answer as it comes. Raises RequestError."""
        asked: list[Json] = [*self.history, {"role": "user", "content": text}]
        call = self.call(asked, self.settings)
        prompt = self.running.tokenizer.chat(call.messages, call.template_options)
        options = call.options
        request = Request(
            tuple(prompt),
            options.max_tokens,
            options.sampling,
            options.stop,
            message=True,
            constraint=options.constraint,
        )
        self.stats = _Stats(len(prompt), total_tokens=self.stats.total_tokens)
        said = []
        try:
            with contextlib.closing(self._events(request)) as events:
                for event in events:
                    said.append(event.text)
                    self.out.write(event.text)
                    self.out.flush()
        except KeyboardInterrupt:
            if not self.terminal:
                raise
            self.out.write(" (interrupted)")
        self.out.write("\n")
        self.out.flush()
        self.history = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _events(self, request: Request) -> Generator[Event, None, None]:
        """The events of an answer; closing it ends the answer. Raises ServingError when it fails."""
        events: SimpleQueue[Event] = SimpleQueue()
        start = time.perf_counter()
        ticket = self.running.submit(request, events.put)
        try:
            while True:
                event = events.get()
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
        """Obeys a line that begins with a slash. False: leave."""
        word, _, rest = line.partition(" ")
        actions: dict[str, Callable[[], str]] = {
            "/help": lambda: HELP,
            "/stats": lambda: str(self.stats),
            "/reset": self._reset,
            "/set": lambda: self._set(rest),
        }
        if word in ("/exit", "/quit"):
            return False
        action = actions.get(word)
        text = action() if action is not None else f"unknown command {word}; /help lists them"
        self.out.write(f"{text}\n")
        self.out.flush()
        return True

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


def _value(text: str) -> Json:
    """A value as JSON where it is JSON, as text otherwise; nothing removes the setting."""
    try:
        found: Json = json.loads(text) if text else None
    except ValueError:
        return text
    return found


def chat(path: Path | str, threads: int | None = None) -> int:
    """Talks about the bundle in directory `path` until the input ends; returns the exit code.

    On a terminal there is a prompt; otherwise every line of the input is a message or a command, and only
    answers are written. The exit code is 1 when a message of such an input could not be answered.
    """
    from mlcbuild_runtime.text import Tokenizer
    from mlcbuild_runtime.vm import Model

    try:
        model = Model.load(Path(path), threads)
        tokenizer = Tokenizer.load(Path(path), model.manifest.serving)
    except ServingError as error:
        sys.stderr.write(f"mlcbuild chat: {error}\n")
        return error.exit_code
    running = Engine(model, tokenizer, max_batch=1).start()
    try:
        return _converse(_Session(running, sys.stdout, sys.stdin.isatty() and sys.stdout.isatty()))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads on. What is left in the buffer must go somewhere when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        running.close()


def _converse(session: _Session) -> int:
    terminal = session.terminal
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() a history and editing)
        session.out.write(f"{session.running.model.manifest.name}: /help lists the commands\n")
    for line in _lines(terminal):
        if line.startswith("/"):
            if not session.command(line):
                break
        elif line:
            try:
                session.answer(line)
            except ServingError as error:
                session.failed = True
                sys.stderr.write(f"{error}\n")
    return 1 if session.failed and not terminal else 0


def _lines(terminal: bool) -> Iterator[str]:
    """Lines of the input, without surrounding spaces. Ctrl-C on a terminal only clears the line."""
    while True:
        try:
            yield input("> " if terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            sys.stdout.write("\n")
        except UnicodeDecodeError as error:
            sys.stderr.write(f"the input is not {error.encoding}: {error.reason}\n")
