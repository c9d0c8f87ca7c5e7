"""Renders chat templates with Jinja, in a sandbox, with the helper functions that transformers provides.

It runs in a child process, because a template may loop for ever or write more than fits into memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

from mlcbuild_format.fields import Json

from mlcbuild_runtime.text.child import limit_memory

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

SECONDS, SECONDS_PER_MIB = 2.0, 0.5
"""SECONDS is the maximum CPU time, in seconds, for rendering one prompt; SECONDS_PER_MIB is added for each
whole MiB of its messages and template. The template of Qwen3 takes 0.2 s for 7 MiB in 170,000 messages."""
MEMORY = 256 << 20
"""Maximum bytes of address space that the process which renders prompts may add to its size at the start, on
systems with such a limit."""
TEXT = 16 << 20
"""Maximum size of a prompt in bytes."""
ERROR = 2000
"""Maximum length, in characters, of the message with which the child process reports that a chat template
refuses a chat or fails; the rest is cut off."""


def seconds(size: int) -> float:
    """Returns the maximum CPU seconds for rendering a chat template, which rise with each whole MiB of
    `size`: the bytes of the JSON document with the template and its variables."""
    return SECONDS + SECONDS_PER_MIB * (size >> 20)


def work() -> None:
    """Runs the child process that renders chat templates: reads a JSON object {"source": a template,
    "variables": its variables} from each line of its input, and writes a line with {"text": the prompt},
    {"refused": the message with which the template refuses} or {"failed": the reason}. A template that takes
    too much CPU time ends the process by a signal, without a line. A line with an integer adds it to the
    process's niceness, and is answered with `true`."""
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401  (what templates need is loaded before their time runs)

    limit_memory(MEMORY)
    templates: dict[str, Template] = {}
    # Modules that are imported late must not count in that time.
    _answer({"source": "", "variables": {}}, templates, 0)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if isinstance(request, int):
            os.nice(request)
            answer: Json = True
        else:
            answer = _answer(request, templates, len(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answer(request: Mapping[str, Json], templates: dict[str, Template], size: int) -> dict[str, Json]:
    """Renders a chat template, and returns {"text": the prompt}, {"refused": the template's message} or
    {"failed": the reason}. A template that takes too much CPU time ends the process by a signal.

    templates: cache, source -> compiled template; size: bytes of the request, by which the CPU time is
    limited. Only the template's work is timed: reading and writing texts is bounded by their size.
    """
    source, variables = str(request["source"]), request["variables"]
    assert isinstance(variables, dict)
    _mark_calls(variables.get("messages"))
    signal.setitimer(signal.ITIMER_PROF, seconds(size))  # Its signal ends the process.
    try:
        if source not in templates:
            templates[source] = compiled(source)
        return {"text": _written(templates[source], variables)}
    except _RefusedError as error:
        return {"refused": str(error)[:ERROR]}
    except Exception as error:  # Whatever a template may do
        return {"failed": _reason(error)[:ERROR]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _Arguments(dict[str, Json]):
    """The arguments of a tool call. Most templates read them as an object; some append them to a text, as
    OpenAI's API states them, and then they become JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


class _NoContent(str):
    """The content of a message that has only tool calls. Some templates read it as a text; others test
    whether it is none, as in OpenAI's API, and some of DeepSeek's write the calls only then. It is an empty
    text for which that test is true."""

    __slots__ = ()


def _is_none(value: object) -> bool:
    return value is None or isinstance(value, _NoContent)


def _mark_calls(messages: Json) -> None:
    """Replaces, in place, the arguments of all tool calls in the messages of a chat by objects that templates
    may also append to texts, and an empty content beside calls by one that is also none. Arguments that are
    no JSON object stay as they are."""
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if calls and isinstance(message, dict) and not message.get("content"):
            message["content"] = _NoContent()
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), dict):
                function["arguments"] = _Arguments(arguments)


def _reason(error: Exception) -> str:
    match error:
        case UnicodeEncodeError():
            return "there is a part of a character, a surrogate, in its text"
        case MemoryError():
            return f"it takes more than {MEMORY >> 20} MiB of memory"
        case RecursionError():
            return "it is nested too deeply, or calls itself without end"
        case _TooLongError():
            return f"its text has more than {TEXT >> 20} MiB"
    return f"{type(error).__name__}: {error}"


def _written(template: Template, variables: Mapping[str, Json]) -> str:
    parts, size = list[str](), 0
    for part in template.generate(variables):
        parts.append(part)
        size += len(part.encode())
        if size > TEXT:
            raise _TooLongError
    return "".join(parts)


class _RefusedError(Exception):
    """The error for a chat template that has called `raise_exception`; its text is the template's message."""


class _TooLongError(Exception):
    """The error for a prompt that is longer than 16 MiB."""


def compiled(source: str) -> Template:
    """Compiles the source text of a chat template with Jinja, anew at each call, and returns the template.
    Raises any exception of Jinja or Python for an invalid one."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Implements the tag `{% generation %}` of chat templates, which marks an assistant's words for
        training: only its content is kept.
        """

        tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"], environment.tests["none"] = _to_json, _is_none
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns a value as JSON text, for the filter `tojson` of chat templates. Jinja's own filter of this
    name would escape the text for HTML. The parameters are those of `json.dumps`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: object = "") -> NoReturn:
    raise _RefusedError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
