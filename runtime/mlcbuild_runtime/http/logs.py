"""Formats log lines so that text from clients or bundles can neither control a terminal nor forge a line."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from datetime import UTC, datetime
from itertools import pairwise
from types import TracebackType

from mlcbuild_format.fields import printable

_Failure = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
log = logging.getLogger(__name__)


def json_line(fields: Mapping[str, object]) -> str:
    """Returns a JSON object on one line without a line feed, in which all control characters are escaped."""
    # json.dumps escapes all control characters except DEL.
    return json.dumps(fields, separators=(",", ":")).replace("\x7f", "\\u007f")


def event_line(message: str, form: str, level: int = logging.INFO) -> str:
    """Returns the line about an event in a server's life, such as its end, without a line feed and with
    control characters escaped. form: "json" for a JSON object with the fields `time`, `level` and `message`;
    any other form is text for people, without the level."""
    if form != "json":
        return f"mlcbuild-serve: {printable(message)}"
    return JsonFormatter().format(logging.LogRecord(__name__, level, "", 0, message, None, None))


def asks_for_json(words: Sequence[str]) -> bool:
    """Returns True if the arguments of a server's command line select a log of JSON lines. It may be called
    before the arguments are parsed, so that their errors are such lines, too."""
    return "--log=json" in words or ("--log", "json") in pairwise(words)


@contextmanager
def usage_errors(words: Sequence[str]) -> Iterator[None]:
    """Returns a context in which a command line is parsed. If its arguments `words` select a log of JSON
    lines, the error of argparse is written to standard error as such a line, without the usage. The
    SystemExit of argparse is raised again."""
    if not asks_for_json(words):
        yield
        return
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            yield
    except SystemExit:
        for line in errors.getvalue().splitlines()[-1:]:
            sys.stderr.write(event_line(line, "json", logging.ERROR) + "\n")
        raise


class JsonLines(io.StringIO):
    """A stream that writes each line of a text to standard error, as a JSON object with the fields `time`,
    `level` (INFO) and `message`. A text without a line feed at its end counts as a whole line."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            sys.stderr.write(event_line(line, "json") + "\n")
        return len(text)


class OneLineFormatter(logging.Formatter):
    """A log formatter that writes each message as one line, with line breaks and control characters as Python
    escapes; only a traceback has more lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record).rstrip("\n"))

    def formatException(self, ei: _Failure) -> str:  # noqa: N802
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """A log formatter that writes each message as a JSON object on one line, with the fields `time` (ISO
    8601, UTC, milliseconds), `level`, `message` and, after a failure, `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"time": time, "level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json_line(fields)


def to_stderr(form: str = "text") -> None:
    """Configures the process's log: warnings, and what the runtime itself reports at level INFO, such as a
    model that was loaded, go to standard error, or to the handlers that the root logger has already. form:
    "json" for lines of JSON on standard error, also for Python's warnings and for exceptions that nobody
    handles; any other form is text for people."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if form == "json" else OneLineFormatter("%(levelname)s: %(message)s")
    )
    logging.basicConfig(handlers=[handler])
    logging.getLogger("mlcbuild_runtime").setLevel(logging.INFO)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_failure
        threading.excepthook = _log_failure_of_thread


def _log_failure(kind: type[BaseException], failure: BaseException, traceback: TracebackType | None) -> None:
    log.critical("the server failed: %r", failure, exc_info=(kind, failure, traceback))


def _log_failure_of_thread(arguments: threading.ExceptHookArgs) -> None:
    failure = arguments.exc_value
    if failure is not None:
        _log_failure(arguments.exc_type, failure, arguments.exc_traceback)
