"""Lines of the log: what a client or a bundle has written cannot move a terminal's cursor or forge a line."""

from __future__ import annotations

import logging
from types import TracebackType

from mlcbuild_format.fields import printable

_Failure = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class Lines(logging.Formatter):
    """A message is one line; only a traceback has more."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record).rstrip("\n"))

    def formatException(self, ei: _Failure) -> str:  # noqa: N802
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


def to_stderr() -> None:
    """Writes the process's log to its standard error, unless it goes elsewhere already."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
