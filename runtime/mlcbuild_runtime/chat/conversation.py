"""One chat: its messages, its settings, and the commands that change them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from mlcbuild_format import strict_json
from mlcbuild_format.errors import RequestError, ServingError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.chat.chat_model import AnswerPart, ChatModel, Speed
from mlcbuild_runtime.chat.chat_options import ChatOptions
from mlcbuild_runtime.chat.line_input import messages, piped, typed
from mlcbuild_runtime.chat.rendering import Printer, plain_printer, printer

HELP = """\
/help              this text
/set name value    temperature, top_p, top_k, min_p, seed, max_tokens, stop; system TEXT
/stats             speed of the last answer, and totals
/metrics           counts of the engine since its start
/regen             answer the last message again
/save FILE         write the conversation to a new file, as JSON
/reset             forget the conversation; so does /clear
/exit              leave (so does the end of the input)
A line that ends with \\ goes on in the next; so does everything from \"\"\" to the next \"\"\".
Ctrl-C interrupts an answer."""
COMMANDS = ("/help", "/set", "/stats", "/metrics", "/regen", "/save", "/reset", "/clear", "/exit", "/quit")
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "system")
"""Names of the settings that Tab completes; the command `/set` also accepts other fields of a request."""
UNANSWERED = "the answer ended while the model was reasoning: set a larger max_tokens\n"
FIXED = (
    *("messages", "model", "stream", "stream_options"),
    *("logprobs", "top_logprobs", "n", "tools", "tool_choice"),
)
"""Names of the fields of a chat completions request that the command-line chat sets itself or does not
support; its command `/set` refuses them."""


@dataclass
class Conversation:
    """The state of a chat: its messages and settings."""

    model: ChatModel
    out: TextIO
    printer: Printer
    terminal: bool
    history: list[Json] = field(default_factory=list)
    settings: dict[str, Json] = field(default_factory=dict)
    system: str = ""
    total_tokens: int = 0
    failed: bool = False
    """True once a message or a command of the chat has failed, because the model could not answer."""

    def _with_system(self, listed: list[Json]) -> list[Json]:
        head: list[Json] = [{"role": "system", "content": self.system}] if self.system else []
        return head + listed

    def answer(self, message: str) -> None:
        """Sends the user's message to the model, prints the answer as it arrives, and adds both to the chat.
        The reasoning before the answer is only printed; if nothing follows it, a hint is written to stderr.
        Ctrl-C on a terminal ends the answer; what has arrived of it is kept. Otherwise Ctrl-C raises
        KeyboardInterrupt. Raises ServingError if the model cannot answer; the chat then stays as it was."""
        asked: list[Json] = [*self.history, {"role": "user", "content": message}]
        parts: list[AnswerPart] = []
        answer = self.model.answer(self._with_system(asked), self.settings)
        try:
            with contextlib.closing(answer), self.printer() as show:
                for part in answer:
                    parts.append(part)
                    show(part)
            if {part.is_reasoning for part in parts if part.text.strip()} == {True}:
                sys.stderr.write(UNANSWERED)
        except KeyboardInterrupt:
            if not self.terminal:
                raise
            self.out.write("(interrupted)\n")
            self.out.flush()
        self.total_tokens += self.model.speed.answer_tokens
        text = "".join(part.text for part in parts if not part.is_reasoning)
        self.history = [*asked, {"role": "assistant", "content": text}]

    def command(self, line: str) -> bool:
        """Executes a command of the chat, a line that begins with a slash, and prints its result, or a
        message for an unknown command. Returns False if the chat should end. Raises ServingError if the
        command is for the model and the model fails."""
        word, _, rest = line.partition(" ")
        actions: dict[str, Callable[[], str]] = {
            "/help": lambda: HELP,
            "/stats": self._stats,
            "/metrics": self._metrics,
            "/regen": self._regen,
            "/save": lambda: self._save(rest.strip()),
            "/reset": self._reset,
            "/clear": self._reset,
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

    def _stats(self) -> str:
        speed = self.model.speed
        if speed == Speed() and self.history:
            return "the speed of the last answer is not reported"
        return str(speed) if speed == Speed() else f"{speed}; {self.total_tokens} tokens answered in all"

    def _metrics(self) -> str:
        shown = self.model.metrics()
        width = max(map(len, shown), default=0)
        return "\n".join(f"{name.replace('_', ' '):<{width}}  {value}" for name, value in shown.items())

    def _regen(self) -> str:
        """Replaces the last answer of the chat by a new one, which it prints. Returns "", or a message if
        there is no answer to replace. Raises ServingError if the model cannot answer; the last answer then
        stays."""
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
        document = {"model": self.model.name, **self.settings, "messages": self._with_system(self.history)}
        try:
            # In JSON the backslash escape of an unpaired surrogate means that surrogate.
            with Path(name).open("x", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(document, file, indent=2, ensure_ascii=False)
                file.write("\n")
        except OSError as error:
            return f"{name} cannot be written: {error.strerror}"
        except ValueError:
            return "a file name cannot contain the character NUL"
        return f"{name}: {len(self.history)} messages"

    def _reset(self) -> str:
        self.history = []
        return "the conversation is forgotten"

    def _set(self, text: str) -> str:
        name, value = _assignment(text)
        if value is None:
            return "usage: /set name value, for example /set temperature 0.7"
        if name == "system":
            self.system = value
            return "system message set" if value else "system message removed"
        if name in FIXED:
            return f"{name} cannot be set here"
        changed = {**self.settings, name: _value(value)}
        try:
            self.model.check([{"role": "user", "content": ""}], changed)
        except RequestError as error:
            return str(error)
        self.settings = changed
        return f"{name} = {json.dumps(changed[name])}"


def _assignment(text: str) -> tuple[str, str | None]:
    """Returns (name, value) of a setting written as `name=value` or `name value`, both without surrounding
    spaces; the value is "" after a bare `name=`, and None if the text has only a name."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if equals and name and " " not in name:
        return name, value
    name, space, value = text.strip().partition(" ")
    return name, value.strip() if space else None


def _value(text: str) -> Json:
    """Returns the value of a chat's setting from its text: decoded JSON if the text is JSON, the text itself
    otherwise. "", like null, gives None, with which the model's default applies again."""
    try:
        setting: Json = strict_json.parse(text) if text else None
    except ValueError:
        return text
    return setting


def converse(model: ChatModel, options: ChatOptions) -> int:
    """Holds a chat with a model on the terminal, or with piped input, until the input ends, and returns the
    exit code: 1 if a piped message could not be answered or a piped command failed, 2 if the only message was
    to be read from an empty input, else 0, so always on a terminal. options: settings with which the chat
    begins. Raises ServingError if the model refuses them, or cannot answer the only message."""
    show = sys.stdout.isatty()
    terminal = show and sys.stdin.isatty() and options.prompt is None
    rendered = printer(sys.stdout) if show and not options.plain else plain_printer(sys.stdout, show)
    chat = Conversation(model, sys.stdout, rendered, terminal, system=options.system)
    passed = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    chat.settings = {name: value for name, value in passed.items() if value is not None}
    model.check([{"role": "user", "content": ""}], chat.settings)
    if options.prompt is not None:
        text = sys.stdin.read() if options.prompt == "-" else options.prompt
        if options.prompt == "-" and not text.strip():
            sys.stderr.write(f"{options.program}: '-': standard input is empty: pipe the message into it\n")
            return 2
        chat.answer(text)
        return 0
    if terminal:
        chat.out.write(f"{model.name}: /help lists the commands\n")
        if model.greeting:
            chat.out.write(f"{model.greeting}\n")
        chat.out.flush()
    words = {"": COMMANDS, "/set": SETTINGS}
    with typed(words) if terminal else piped() as read:
        return _loop(chat, messages(read))


def _loop(chat: Conversation, lines: Iterator[str]) -> int:
    for line in lines:
        try:
            if line.startswith("/") and "\n" not in line:
                if not chat.command(line):
                    break
            elif line:
                chat.answer(line)
        except ServingError as error:
            chat.failed = True
            sys.stderr.write(f"{error}\n")
    return 1 if chat.failed and not chat.terminal else 0
