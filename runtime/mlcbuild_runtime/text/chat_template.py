"""Reads the chat templates of checkpoints, and renders prompts with them."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mlcbuild_format import files
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.text import jinja
from mlcbuild_runtime.text.child import Child, EndedError, as_line
from mlcbuild_runtime.text.turns import CrowdedError, FairLock

BUSY = 2.5
"""Wall-clock seconds that rendering a prompt may take for each permitted CPU second."""
SHORT = 64 << 10
"""Maximum bytes of a chat, as JSON with its template, that counts as short: it is rendered in milliseconds,
and does not wait for long ones, which may take tenths of a second."""
SHORT_WAITING, LONG_WAITING = 48, 16
"""SHORT_WAITING is the maximum number of requests with short chats (at most SHORT bytes) that may wait to
have their prompts rendered by one model's template, LONG_WAITING the maximum number of those with long chats.
Beyond it one request is refused with status 503: the new one, or one of a client that has at least two more
waiting."""
LONGEST_WAIT = 5.0
"""Maximum seconds that a request waits for its turn while the prompts of other requests are rendered, one at
a time; then it is refused with status 503."""
LONG_NICE = 5
"""Increment of the niceness (19 is the lowest priority) for the child process that renders long chats as
prompts: those of more than 64 KiB (SHORT)."""

Message = Mapping[str, Json]


TEMPLATES = ("chat_template.jinja", "chat_template.json")
MAX_TEMPLATE = 1 << 20
"""Maximum bytes of a file with a chat template."""


def find_template(path: Path, config: Mapping[str, Json], present: Collection[str]) -> str | None:
    """Returns the source text of the chat template of the tokenizer in directory `path`; None if it has none.

    `config` is its tokenizer_config.json, and `present` the names of the files that may be read. The file
    chat_template.jinja comes before `config`, and that before chat_template.json; of several named templates,
    the one called `default` is returned, None if there is no such one. Raises BundleError for a file that
    cannot be read.
    """
    file, other = TEMPLATES
    if file in present:
        return files.read_text(path / file, MAX_TEMPLATE)
    template = config.get("chat_template")
    if template is None and other in present:
        template = files.read_json(path / other, MAX_TEMPLATE).get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


class ChatTemplate:
    """A chat template and the special tokens (`bos_token`, ...) that it may write. It is rendered in separate
    child processes, one for short chats and one for long ones, so that neither an endless template nor a long
    conversation blocks other work. Any thread may use it."""

    def __init__(self, source: str | None, special: Mapping[str, str]) -> None:
        self._source, self._special = source, special
        self._short, self._long = _Renderer(SHORT_WAITING, 0), _Renderer(LONG_WAITING, LONG_NICE)

    @property
    def source(self) -> str:
        """Returns the source text of the chat template; "" if there is none."""
        return self._source or ""

    def render(self, messages: Sequence[Message], options: Mapping[str, Json]) -> str:
        """Returns the text of the prompt for an answer to `messages`. options: more variables for the
        template. Raises RequestError: 400 if there is no template, if `options` cannot be encoded as UTF-8,
        or with the template's own message if it refuses the messages, 422 if it fails or takes too long, 503
        if too many requests wait, the child process does not become ready or the server is stopping;
        SetupError if the child process cannot be started or ends with code 1."""
        if self._source is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or build the bundle from a checkpoint"
                " that has chat_template.jinja or a chat_template in tokenizer_config.json",
                code="no_chat_template",
            )
        variables = {"tools": None, "documents": None, **self._special, **options}
        variables |= {"messages": [dict(message) for message in messages], "add_generation_prompt": True}
        line = as_line({"source": self._source, "variables": variables})
        match (self._short if len(line) <= SHORT else self._long).answer(line):
            case {"text": str(text)}:
                return text
            case {"refused": str(words)}:
                raise RequestError(f"the model's chat template refuses these messages: {one_line(words)}")
            case {"failed": str(reason)}:
                check_text(options)
                raise failed(reason)
        raise AssertionError

    def close(self) -> None:
        """Ends templates that are being rendered, and their processes, for good: their requests and all later
        ones get RequestError (503). Any thread may call it."""
        self._short.close()
        self._long.close()


class _Renderer:
    """A child process that renders one prompt at a time, and the queue of requests that wait for it."""

    def __init__(self, waiting: int, niceness: int) -> None:
        # The answer to the first document keeps the start of the process out of a prompt's time limit.
        self.child = Child("mlcbuild_runtime.text.jinja", "renders chat templates", lambda: niceness)
        self._turns = FairLock(waiting)
        self._patience = LONGEST_WAIT
        """Maximum seconds that a request waits while the prompts of others are rendered. It is 0 after a
        prompt that took too long or ended the process, since the next probably would, too, until the process
        has answered one: meanwhile requests that would have to wait are refused."""

    def answer(self, line: bytes) -> Json:
        """Sends a line, a template with its variables, to the child process and returns its answer: a JSON
        object with the prompt or the reason of a failure. Raises RequestError: 422 if the template takes too
        long or its process ends, 503 if too many requests wait, one waits too long, a new process does not
        become ready or the server is stopping; SetupError if no process can be started or it ends with code
        1."""
        most = jinja.seconds(len(line))
        try:
            with self._turns.turn(self._patience):
                answer = self.child.ask_line(line, BUSY * most)
                self._patience = LONGEST_WAIT
        except CrowdedError:
            raise RequestError(
                "the model's chat template takes long, and other requests wait for it: try again later",
                code="overloaded",
                status=503,
            ) from None
        except EndedError as error:
            self._patience = 0.0
            if error.code in (None, -signal.SIGPROF):
                raise failed(f"it takes more than {most:g} s") from None
            raise failed(f"its process ended with code {error.code}") from None
        return answer

    def close(self) -> None:
        self.child.close()


def failed(reason: str) -> RequestError:
    """Returns the error for a chat template that fails. Its status 422 means that sending the request again
    will not help. reason: text that the message states, as one line."""
    return RequestError(
        f"the bundle's chat template fails: {one_line(reason)}", code="template_failed", status=422
    )


def one_line(text: str) -> str:
    """Returns a text as one line of at most 300 characters, with single spaces; control characters, which a
    terminal would obey, become spaces. A longer text is cut to 297 characters and "..."."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text[:2000])
    printable = " ".join(printable.split())
    return printable if len(printable) <= 300 else f"{printable[:297]}..."


def check_text(options: Mapping[str, Json]) -> None:
    """Raises RequestError for template variables that cannot be encoded as UTF-8."""
    try:
        json.dumps(options, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(
            "chat_template_kwargs has a part of a character in it, a surrogate such as \\ud800: leave it out",
            param="chat_template_kwargs",
        ) from None
