"""Formats log lines so that text from clients or bundles can neither control a terminal nor forge a line."""

from __future__ import annotations

import logging
from types import TracebackType

from mlcbuild_format.fields import printable

_Failure = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class OneLineFormatter(logging.Formatter):
    """A log formatter that writes each message as one line; only a traceback has more lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record).rstrip("\n"))

    def formatException(self, ei: _Failure) -> str:  # noqa: N802
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


def to_stderr() -> None:
    """Sends the process's log to standard error, unless logging is configured already: warnings, and what
    the runtime itself reports, such as a model that was loaded."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("mlcbuild_runtime").setLevel(logging.INFO)
