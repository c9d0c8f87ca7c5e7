"""HTTP: `GET`, `HEAD` and `PUT` of `<url>/ac/<64 hex>` and `<url>/cas/<64 hex>`.

This is the protocol of Bazel's HTTP cache, which any WebDAV server speaks. The standard library's client is
enough for it: one kept connection for each thread, bodies in pieces, ranges.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import BinaryIO
from urllib.parse import quote, urlsplit

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.auth import authorization, variables
from mlcbuild.remotes.transport import CHUNK, CONNECT, PAUSES, SLOWEST, TIMEOUT, Body, SlowError

_BUSY = {429, 502, 503, 504}
_FULL = {413, 507}
_BROKEN = (OSError, http.client.HTTPException)


class Http:
    """A transport. Raises RemoteError for credentials that cannot be used."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port
        self._path = quote(parts.path.rstrip("/"), safe="/%")
        self._timeout = timeout
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        found = authorization(self._host)
        self._headers = {"User-Agent": "mlcbuild", **({"Authorization": found} if found else {})}
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self._closed = False

    def open(self, name: str, start: int = 0) -> Body | None:
        headers = {"Range": f"bytes={start}-"} if start else {}
        response = self._ask("GET", name, headers)
        if response.status == 416:  # shorter than it should be: what is there, from the beginning
            response.read()
            response = self._ask("GET", name)
        if _is_missing(response):
            return None
        self._demand(response, 200, 206)
        begin = 0
        if response.status == 206:
            stated = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            begin = int(stated[1]) if stated else -1
            if begin != start:
                self._drop()
                raise RemoteError("it answered another range than the one it was asked for")
        return Body(begin, _Pace(response, self._timeout).read, lambda: self._finish(response))

    def size(self, name: str) -> int | None:
        response = self._ask("HEAD", name)
        response.read()
        if _is_missing(response):
            return None
        self._demand(response, 200)
        length = response.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        response = self._put(name, source, size)
        if response.status == 409:  # some servers want the collection to be there
            self._ask("MKCOL", name.partition("/")[0] + "/").read()
            response = self._put(name, source, size)
        response.read()
        self._demand(response, 200, 201, 204)

    def close(self) -> None:
        self._closed = True
        for connection in list(self._connections):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it; close does not
            connection.close()

    def _put(self, name: str, source: BinaryIO, size: int) -> http.client.HTTPResponse:
        return self._ask("PUT", name, {"Content-Length": str(size)}, source)

    def _ask(
        self, method: str, name: str, headers: dict[str, str] | None = None, source: BinaryIO | None = None
    ) -> http.client.HTTPResponse:
        """The answer to a request, tried again after faults that may pass."""
        for pause in (*PAUSES, None):
            try:
                response = self._once(method, name, headers or {}, source)
            except TimeoutError:
                self._drop()
                raise RemoteError("it does not answer") from None
            except ssl.SSLCertVerificationError as error:
                self._drop()
                raise RemoteError(f"its certificate is not valid: {error.verify_message}") from None
            except _BROKEN as error:
                self._drop()
                if pause is None or self._closed:
                    raise RemoteError(_words(error)) from None
            except BaseException:  # from the source of a body
                self._drop()
                raise
            else:
                if response.status not in _BUSY or pause is None:
                    return response
                self._drop()
            time.sleep(pause)
        raise AssertionError("the last turn returns or raises")

    def _once(
        self, method: str, name: str, headers: dict[str, str], source: BinaryIO | None
    ) -> http.client.HTTPResponse:
        connection = self._connection()
        if source is not None:
            source.seek(0)
        try:
            connection.request(method, f"{self._path}/{name}", source, {**self._headers, **headers})
        except (BrokenPipeError, ConnectionResetError):
            if source is None:
                raise
            # A server that refuses a body may close before it has read all of it: its answer says why.
        return connection.getresponse()

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if found is None:
            patience = min(self._timeout, CONNECT)
            if self._tls is not None:
                found = http.client.HTTPSConnection(
                    self._host, self._port, timeout=patience, blocksize=CHUNK, context=self._tls
                )
            else:
                found = http.client.HTTPConnection(self._host, self._port, timeout=patience, blocksize=CHUNK)
            found.connect()
            found.sock.settimeout(self._timeout)
            self._local.connection = found
            self._connections.append(found)
        return found

    def _drop(self) -> None:
        """Forgets this thread's connection: what comes next on it is not known."""
        found: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if found is not None:
            found.close()
            self._connections.remove(found)
            self._local.connection = None

    def _finish(self, response: http.client.HTTPResponse) -> None:
        """A connection on which something is left unread is not used again."""
        if not response.isclosed():
            self._drop()
        response.close()

    def _demand(self, response: http.client.HTTPResponse, *accepted: int) -> None:
        if response.status in accepted:
            return
        self._drop()
        raise RemoteError(_refusal(response.status, self._host, "Authorization" in self._headers))


class _Pace:
    """Reads a body and gives up on one that comes drop by drop."""

    def __init__(self, response: http.client.HTTPResponse, timeout: float) -> None:
        self._response = response
        self._timeout = timeout
        self._since = time.monotonic()
        self._count = 0

    def read(self) -> bytes:
        try:
            data = self._response.read1(CHUNK)
        except TimeoutError:
            raise RemoteError(f"it sent nothing for {self._timeout:.0f} seconds") from None
        except (*_BROKEN, ValueError, AttributeError) as error:  # the latter two: closed by another thread
            raise RemoteError(_words(error)) from None
        if not data and self._response.length:
            raise RemoteError("its answer ended early")
        self._count += len(data)
        elapsed = time.monotonic() - self._since
        if elapsed > self._timeout:
            if self._count < SLOWEST * elapsed:
                raise SlowError(f"it is too slow: {self._count} bytes in {elapsed:.0f} seconds")
            self._since, self._count = time.monotonic(), 0
        return data


def _is_missing(response: http.client.HTTPResponse) -> bool:
    if response.status not in (404, 410):
        return False
    response.read()
    return True


def _words(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "its answer ended early"
    if isinstance(error, http.client.HTTPException):
        return f"its answer is not HTTP ({type(error).__name__})"
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}"


def _refusal(status: int, host: str, authorized: bool) -> str:
    if status in (401, 403):
        token, login = variables(host)
        if authorized:
            return f"it refuses the credentials for {host} (status {status})"
        return (
            f"it wants credentials (status {status}): set ${token} to a token, or ${login} to "
            "user:password, or write them into netrc"
        )
    if 300 <= status < 400:
        return f"it sends clients elsewhere (status {status}): write the final address into the recipe"
    if status in _FULL:
        return f"it is full (status {status})"
    return f"it answered with status {status}"
