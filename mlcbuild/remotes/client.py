"""Requests over HTTP, with the standard library: kept connections, bodies in pieces, retries, proxies.

Proxies are those of the environment (`HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`), and certificates are checked
against the system's, or those in `SSL_CERT_FILE`.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import select
import socket
import ssl
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import SplitResult, unquote, urlsplit

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.transport import CHUNK, CONNECT, PAUSES, SLOWEST, TIMEOUT, Body, SlowError

_BUSY = {429, 500, 502, 503, 504}
_FULL = {413, 507}
_SENT = 1 << 17
"""Bytes of a body that must go within the timeout: more would ask for a server faster than SLOWEST."""
_SHORT = 1 << 16
"""Bytes that are read of an answer of which only the status, or what its beginning says, matters."""
_BROKEN = (OSError, http.client.HTTPException)
Response = http.client.HTTPResponse


class Client:
    """One server, https://host:port or http://host:port. Methods may be called from several threads.

    Each answer must be given to `body`, `end` or `discard`: its connection is then used again, or closed.
    """

    def __init__(self, address: str, timeout: float = TIMEOUT) -> None:
        self._connections: set[http.client.HTTPConnection] = set()
        self._idle: list[http.client.HTTPConnection] = []
        self._answers: dict[Response, http.client.HTTPConnection] = {}
        """Those that are not read yet, and where they come from."""
        self._closed = False
        parts = urlsplit(address)
        self.host = parts.hostname or ""
        self.timeout = timeout
        self._port = parts.port
        self._tls = _context() if parts.scheme == "https" else None
        self._proxy = _proxy(parts)

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        source: BinaryIO | None = None,
    ) -> Response:
        """The answer to a request. Raises RemoteError.

        After faults that may pass it is tried again, unless it is a PATCH, of which a part may have arrived.
        """
        for pause in (*(PAUSES if method != "PATCH" else ()), None):
            try:
                response = self._once(method, target, headers or {}, source)
            except TimeoutError:
                raise RemoteError("it does not answer") from None
            except ssl.SSLCertVerificationError as error:
                raise RemoteError(
                    f"its certificate is not valid: {error.verify_message}; if an authority of your own has "
                    "signed it, name that one's certificate in $SSL_CERT_FILE"
                ) from None
            except _BROKEN as error:
                if self._closed:
                    raise RemoteError("the run ends") from None
                if pause is None or isinstance(error, _ProxyError):
                    raise RemoteError(_words(error)) from None
            else:
                if response.status not in _BUSY or pause is None:
                    return response
                self.discard(response)
            time.sleep(pause)
        raise AssertionError("the last turn returns or raises")

    def body(self, response: Response, start: int, share: int = 1) -> Body:
        """The rest of an answer to a request for what is there from `start` on. Raises RemoteError.

        `share`: of how many such that come at the same time, and together not slower than SLOWEST.
        """
        begin = 0
        if response.status == 206:
            stated = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            begin = int(stated[1]) if stated else -1
            if begin != start:
                self.discard(response)
                raise RemoteError("it answered another range than the one it was asked for")
        read = _Pace(response, self.timeout, share).read
        return Body(begin, read, lambda: self.discard(response))

    def end(self, response: Response) -> bytes:
        """The beginning of an answer that is no content; nothing when it breaks off."""
        pace, data = _Pace(response, self.timeout), b""
        with suppress(RemoteError):
            while len(data) < _SHORT and (piece := pace.read()):
                data += piece
        self.discard(response)
        return data[:_SHORT]

    def is_missing(self, response: Response) -> bool:
        """Whether there is no such name; the answer is read then."""
        if response.status not in (404, 410):
            return False
        self.end(response)
        return True

    def discard(self, response: Response) -> None:
        """A connection on which something is left unread is not used again."""
        whole = response.length == 0 or (response.length is None and response.isclosed())
        response.close()
        connection = self._answers.pop(response, None)
        if connection is None:
            return
        if whole and not self._closed:
            self._idle.append(connection)
        else:
            self._forget(connection)

    def close(self) -> None:
        self._closed = True
        for connection in list(self._connections):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it; close does not
            self._forget(connection)

    def __del__(self) -> None:
        self.close()

    def _once(
        self, method: str, target: str, headers: Mapping[str, str], source: BinaryIO | None
    ) -> Response:
        connection = self._connection()
        try:
            response = self._sent(connection, method, target, headers, source)
        except BaseException:  # what comes next on it is not known
            self._forget(connection)
            raise
        self._answers[response] = connection
        return response

    def _sent(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        source: BinaryIO | None,
    ) -> Response:
        if source is not None:
            source.seek(0)
        if self._proxy is not None and self._tls is None:
            port = f":{self._port}" if self._port else ""
            target, headers = f"http://{self.host}{port}{target}", {**headers, **_login(self._proxy)}
        try:
            connection.request(method, target, source, {"User-Agent": "mlcbuild", **headers})
        except (BrokenPipeError, ConnectionResetError):
            if source is None:
                raise
            # A server that refuses a body may close before it has read all of it: its answer says why.
        return connection.getresponse()

    def _connection(self) -> http.client.HTTPConnection:
        with suppress(IndexError):
            while True:
                kept = self._idle.pop()
                if not _is_over(kept):
                    return kept
                self._forget(kept)
        found = self._new()
        self._connections.add(found)
        try:
            found.connect()
            if self._closed:
                raise OSError
        except (*_BROKEN, TimeoutError) as error:
            self._forget(found)
            if self._proxy is None or isinstance(error, ssl.SSLCertVerificationError):
                raise
            why = "it does not answer" if isinstance(error, TimeoutError) else _words(error)
            raise _ProxyError(f"the proxy {self._proxy.hostname}: {why}") from None
        found.sock.settimeout(self.timeout)
        return found

    def _forget(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        self._connections.discard(connection)

    def _new(self) -> http.client.HTTPConnection:
        patience = min(self.timeout, CONNECT)
        host, port = self.host, self._port
        if self._proxy is not None:
            host, port = self._proxy.hostname or "", self._proxy.port or 80
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=patience, blocksize=_SENT)
        found = http.client.HTTPSConnection(host, port, timeout=patience, blocksize=_SENT, context=self._tls)
        if self._proxy is not None:
            found.set_tunnel(self.host, self._port or 443, _login(self._proxy))
        return found


class _ProxyError(OSError):
    """What a proxy did not do."""

    def __init__(self, message: str) -> None:
        super().__init__(0, message)


class _Pace:
    """Reads a body and gives up on one that comes drop by drop."""

    def __init__(self, response: Response, timeout: float, share: int = 1) -> None:
        self._response = response
        self._timeout = timeout
        self._slowest = SLOWEST / share
        self._most = CHUNK if share == 1 else _SHORT
        self._since = time.monotonic()
        self._count = 0

    def read(self) -> bytes:
        try:
            data = self._response.read1(self._most)
        except TimeoutError:
            raise RemoteError(f"it sent nothing for {self._timeout:.0f} seconds") from None
        except (*_BROKEN, ValueError, AttributeError) as error:  # the latter two: closed by another thread
            raise RemoteError(_words(error)) from None
        if not data and self._response.length:
            raise RemoteError("its answer ended early")
        self._count += len(data)
        elapsed = time.monotonic() - self._since
        if elapsed > self._timeout:
            if self._count < self._slowest * elapsed:
                raise SlowError(f"it is too slow: {self._count} bytes in {elapsed:.0f} seconds")
            self._since, self._count = time.monotonic(), 0
        return data


def _is_over(connection: http.client.HTTPConnection) -> bool:
    """Whether a kept connection was closed, or has something to say that nobody asked for."""
    if connection.sock is None:
        return True
    try:
        return bool(select.select([connection.sock], [], [], 0)[0])
    except ValueError:  # a number that select does not take: the next request will tell
        return connection.sock.fileno() < 0


def status_words(status: int, code: str = "") -> str:
    """What a status that nobody wanted, and the server's own word for it, means, as the end of a sentence."""
    words = f"status {status}, {code}" if code else f"status {status}"
    if 300 <= status < 400:
        return f"it sends clients elsewhere ({words}): write the final address into the recipe"
    if status in _FULL:
        return f"it is full ({words})"
    return f"it answered with {words}"


def _context() -> ssl.SSLContext:
    """Raises RemoteError when $SSL_CERT_FILE, which Python passes over when it is not there, has none."""
    chosen = os.environ.get("SSL_CERT_FILE")
    if chosen and not Path(chosen).is_file():
        raise RemoteError(f"$SSL_CERT_FILE names {chosen}, which is no file")
    try:
        return ssl.create_default_context(cafile=chosen or None)
    except ssl.SSLError:
        raise RemoteError(f"$SSL_CERT_FILE names {chosen}, which holds no certificate in PEM form") from None


def _proxy(parts: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for a server. Raises RemoteError for one of an unknown kind."""
    found = urllib.request.getproxies().get(parts.scheme)
    if not found or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = urlsplit(found if "://" in found else f"http://{found}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise RemoteError("the proxy in the environment must be http://host:port")
    return proxy


def _login(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode()}


def _words(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "its answer ended early"
    if isinstance(error, http.client.RemoteDisconnected):
        return "it closed the connection"
    if isinstance(error, http.client.HTTPException):
        return f"its answer is not HTTP ({type(error).__name__})"
    if refused := re.match(r"Tunnel connection failed: (\d+)", str(error)):
        return f"it refuses the connection (status {refused[1]})"
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}"
