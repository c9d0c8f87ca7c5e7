"""Adds deadlines to urllib3 connections: for DNS and connecting, for headers, and for each read of a body.

A socket's timeout limits one read, so a server that sends a byte per second never exceeds it. Here the reads
of one phase share a deadline, after which they raise TimeoutError. http.client reads status, headers, interim
responses, chunks, and a proxy's answer to CONNECT through them.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from concurrent.futures import Future
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from mlcbuild.remotes.background import AbandonedError, within
from mlcbuild.remotes.transport import CONNECT, TIMEOUT


class _TimedReader(io.RawIOBase):
    """A reader of a socket's bytes with one deadline for any number of reads. After the deadline a read
    raises TimeoutError, however slowly or fast bytes arrive."""

    def __init__(self, sock: socket.socket) -> None:
        self.until = 0.0
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class TimedResponse(http.client.HTTPResponse):
    """An HTTP response with a deadline for its headers, including interim responses, and for each read of its
    body. Each is as long as the socket's timeout."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self._patience = sock.gettimeout() or TIMEOUT
        self._timed = _TimedReader(sock)
        self._timed.until = time.monotonic() + self._patience
        self.fp.close()
        self.fp = io.BufferedReader(self._timed)

    def read1(self, n: int = -1) -> bytes:
        self._timed.until = time.monotonic() + self._patience
        return super().read1(n)


class TimedConnection(HTTPConnection):
    """An HTTP connection with deadlines for DNS and connecting, and for its responses."""

    def __init__(self, keep: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._answer: TimedResponse | None = None
        keep(self)

    def response_class(self, sock: socket.socket, **options: Any) -> TimedResponse:  # type: ignore[override]
        self._answer = TimedResponse(sock, **options)
        return self._answer

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]
        try:
            return super().getresponse()
        except BaseException:  # urllib3 does not close a response whose headers it rejects
            if self._answer is not None:
                self._answer.close()
            raise
        finally:
            self._answer = None

    def _new_conn(self) -> socket.socket:
        try:
            return within(min(float(self.timeout or CONNECT), CONNECT), super()._new_conn).result()
        except AbandonedError as error:
            error.future.add_done_callback(_close_late)
            raise urllib3.exceptions.ConnectTimeoutError(self, "it took too long") from None


class PlainConnection(TimedConnection):
    pass


class TlsConnection(TimedConnection, HTTPSConnection):
    pass


def _close_late(future: Future[object]) -> None:
    """Closes a network connection that was established only after the deadline for connecting; does nothing
    if connecting failed. future: that of the call that connects."""
    if future.exception() is None and isinstance(late := future.result(), socket.socket):
        late.close()
