"""Chat templates of checkpoints: where they are found, and prompts from them."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mlcbuild_format import files
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.text import jinja
from mlcbuild_runtime.text.child import Child, EndedError
from mlcbuild_runtime.text.turns import CrowdedError, NewestFirst

PATIENCE = 5.0
"""Seconds by the clock that a prompt may take, and that a request may wait for others' prompts."""
WAITING = 48
"""Requests that may wait for others' prompts."""

Message = Mapping[str, Json]


TEMPLATES = ("chat_template.jinja", "chat_template.json")
MAX_TEMPLATE = 1 << 20
"""Bytes of a file with a chat template."""


def find_template(path: Path, config: Mapping[str, Json], present: Collection[str]) -> str | None:
    """The chat template of the tokenizer in directory `path`, whose tokenizer_config.json is `config`.

    `present`: names of the files that may be read. Of several named templates it is the one called `default`.
    Raises BundleError.
    """
    file, other = TEMPLATES
    if file in present:
        return files.read_text(path / file, MAX_TEMPLATE)
    found = config.get("chat_template")
    if found is None and other in present:
        found = files.read_json(path / other, MAX_TEMPLATE).get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[-1].get("template") if named else None
    return found if isinstance(found, str) else None


class ChatTemplate:
    """A template and the special tokens (`bos_token`, ...) it may write. It is rendered in a child process of
    its own, so that a template without end keeps nobody else waiting. May be used from any thread."""

    def __init__(self, source: str | None, special: Mapping[str, str]) -> None:
        self._source, self._special = source, special
        # A first, empty template: the start of the process does not count as a prompt's time.
        empty: Json = {"source": "", "variables": {}}
        self._child = Child("mlcbuild_runtime.text.jinja", "renders chat templates", lambda: empty)
        self._turns = NewestFirst(WAITING)
        self._patience = PATIENCE
        """0 after a prompt that took too long: others, which would, too, do not wait for their turn then."""

    @property
    def source(self) -> str:
        """Empty where there is none."""
        return self._source or ""

    def render(self, messages: Sequence[Message], options: Mapping[str, Json]) -> str:
        """Returns the prompt for an answer to `messages`. Raises RequestError: 400 with the template's own
        words where it refuses them, 422 where it fails, 503 where too many wait."""
        if self._source is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or build the bundle from a checkpoint"
                " that has chat_template.jinja or a chat_template in tokenizer_config.json",
                code="no_chat_template",
            )
        variables = {"tools": None, "documents": None, **self._special, **options}
        variables |= {"messages": [dict(message) for message in messages], "add_generation_prompt": True}
        match self._answer({"source": self._source, "variables": variables}):
            case {"text": str(text)}:
                return text
            case {"refused": str(words)}:
                raise RequestError(f"the model's chat template refuses these messages: {one_line(words)}")
            case {"failed": str(reason)}:
                check_text(options)
                raise failed(reason)
        raise AssertionError

    def close(self) -> None:
        """Ends what is rendered, from any thread."""
        self._child.close()

    def _answer(self, document: Mapping[str, Json]) -> Json:
        try:
            with self._turns.turn(self._patience):
                answer = self._child.ask(document, PATIENCE)
                self._patience = PATIENCE
        except CrowdedError:
            raise RequestError(
                "the model's chat template takes long, and other requests wait for it: try later",
                code="overloaded",
                status=503,
            ) from None
        except EndedError as error:
            self._patience = 0.0
            if error.code in (None, -signal.SIGPROF):
                raise failed(f"it takes more than {jinja.SECONDS:g} s") from None
            raise failed(f"its process ended with code {error.code}") from None
        return answer


def failed(reason: str) -> RequestError:
    """Returns the error of a template that fails. Its status says that to send the same again is in vain."""
    return RequestError(
        f"the bundle's chat template fails: {one_line(reason)}", code="template_failed", status=422
    )


def one_line(text: str) -> str:
    """Returns the start of a text without line breaks and control characters, which terminals obey."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text[:2000])
    plain = " ".join(plain.split())
    return plain if len(plain) <= 300 else f"{plain[:297]}..."


def check_text(options: Mapping[str, Json]) -> None:
    """Raises RequestError for variables that are no text in UTF-8."""
    try:
        json.dumps(options, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(
            "chat_template_kwargs has a part of a character in it, a surrogate such as \\ud800: leave it out",
            param="chat_template_kwargs",
        ) from None
