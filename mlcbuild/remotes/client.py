"""An HTTP client on urllib3: persistent connections, retries, proxies, and strict deadlines.

urllib3 connects, keeps pools of connections, speaks TLS, tunnels through proxies, and frames bodies; netrc
files are read by the standard library. Five things are written here, because urllib3 does not have them:

    deadlines.py     68 lines of code   one deadline for DNS and connecting, one for all headers of a response
                                        with its interim ones, and one for each read of a body. urllib3's
                                        timeouts limit single reads of a socket, and its `total` does not
                                        cover headers or bodies that arrive byte by byte
    Client.ask       24                 retries until a point in time, and none after a timeout or for PATCH;
                                        urllib3's Retry counts attempts and has no limit of time
    Client.close      8                 ends reads of other threads, so that a run ends at once
    _proxy           13                 the proxy of the environment variables; urllib3 is given its address
    ranges.py        89                 an object over several connections, by the rate that is measured

auth.py (90 lines) looks up credentials by the name of the host, which no recipe can change, and runs Docker's
credential helpers. The rest of this file composes error messages. Certificates are checked against the
system's, or those in `SSL_CERT_FILE`; proxies are those of `HTTPS_PROXY` and `HTTP_PROXY`, except for the
hosts in `NO_PROXY`.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import SplitResult, unquote, urlsplit
from weakref import WeakSet

import urllib3
from urllib3.response import BaseHTTPResponse

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.auth import basic
from mlcbuild.remotes.deadlines import PlainConnection, TimedConnection, TlsConnection
from mlcbuild.remotes.transport import CHUNK, PAUSES, SLOWEST, TIMEOUT, Body, Pace, SlowError

_BUSY = {429, 500, 502, 503, 504}
_FULL = {413, 507}
_SENT = 1 << 17
"""Number of bytes of a request body that this client passes to the socket at once, each time within the
timeout (30 seconds by default). At SLOWEST, the minimum rate of a transfer (16 KiB per second), a much larger
block would take longer."""
_SHORT = 1 << 16
"""Maximum number of bytes that are read of an HTTP response of which only the status, or the beginning of the
body, matters; also the most that is read at once from each of several concurrent transfers."""
_KEPT = 32
"""Maximum number of idle connections to one server that are kept open for later requests, as many as there
are concurrent requests."""
Response = BaseHTTPResponse
_BROKEN = (urllib3.exceptions.HTTPError, OSError, http.client.HTTPException)


class Client:
    """An HTTP client of one server, https://host:port or http://host:port. Methods are thread-safe. Creating
    it raises RemoteError if $SSL_CERT_FILE or the proxy in the environment is invalid. timeout: maximum
    seconds for which the server may send nothing, and over which the rate of a transfer is measured.

    Each response must be passed to `body`, `end` or `discard`, which reuse or close its connection."""

    def __init__(self, address: str, timeout: float = TIMEOUT) -> None:
        self._connections: WeakSet[TimedConnection] = WeakSet()
        self._guard = threading.Lock()
        self._closed = False
        parts = urlsplit(address)
        self.host = parts.hostname or ""
        self.timeout = timeout
        self._address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._proxy = _proxy(parts)
        options: dict[str, Any] = {"maxsize": _KEPT, "blocksize": _SENT}
        if parts.scheme == "https":
            options["ssl_context"] = _context(os.environ.get("SSL_CERT_FILE", ""))
        self._manager = (
            urllib3.PoolManager(**options)
            if self._proxy is None
            else urllib3.ProxyManager(_address(self._proxy), proxy_headers=_login(self._proxy), **options)
        )
        pool = self._manager.connection_from_url(self._address)
        connection = TlsConnection if parts.scheme == "https" else PlainConnection
        pool.ConnectionCls = partial(connection, self._keep)  # type: ignore[assignment]

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        source: BinaryIO | None = None,
    ) -> Response:
        """Sends an HTTP request and returns the response, whatever its status; redirects are not followed.
        target: path and query of the URL; source: the body of the request, which is sent from offset 0, or
        None. Raises RemoteError if no response arrives, SlowError if the server does not answer in time.

        Broken connections and the statuses 429, 500, 502, 503 and 504 are retried twice; after that, the
        response is returned, or RemoteError raised. There is no retry for PATCH, of which a part may have
        arrived, once the timeout has passed, and for invalid certificates and failures of a proxy. An OSError
        from reading `source` counts as a broken connection; its other exceptions pass through.
        """
        began = time.monotonic()
        for pause in (*(PAUSES if method != "PATCH" else ()), None):
            last = pause is None or time.monotonic() - began > self.timeout
            try:
                response = self._once(method, target, headers or {}, source)
            except _BROKEN as error:
                if self._closed:
                    raise RemoteError("the run ends") from None
                reason = self._reason(error)
                if last or isinstance(reason, _FinalError | SlowError):
                    raise reason from None
            else:
                if response.status not in _BUSY or last:
                    return response
                self.discard(response)
            time.sleep(pause or 0)
        raise AssertionError("the last turn returns or raises")

    def body(self, response: Response, start: int, share: int = 1) -> Body:
        """Returns a stream of an HTTP response's body, which begins at offset 0 if the server ignored the
        range. start: offset of the first byte that was requested. share: number of concurrent transfers,
        which together must reach the minimum rate of one transfer. Raises RemoteError if the response has
        another range of bytes; reading from the stream raises it if the transfer breaks off or is too
        slow."""
        begin = 0
        if response.status == 206:
            stated = re.match(r"bytes ([0-9]{1,18})-", response.headers.get("Content-Range", ""))
            begin = int(stated[1]) if stated else -1
            if begin != start:
                self.discard(response)
                raise RemoteError("it sent another range than the requested one")
        return Body(begin, partial(self._read, response, *self._pace(share)), lambda: self.discard(response))

    def end(self, response: Response) -> bytes:
        """Reads and returns up to 64 KiB of a response whose contents matter little, so that its connection
        can be reused; that of a longer response is closed. Returns what arrived, perhaps b"", if the response
        breaks off."""
        data = b""
        with suppress(RemoteError):
            pace, most = self._pace(1)
            while len(data) < _SHORT and (piece := self._read(response, pace, most)):
                data += piece
        self.discard(response)
        return data[:_SHORT]

    def is_missing(self, response: Response) -> bool:
        """Returns True if an HTTP response has the status 404 or 410: the requested name does not exist. Its
        body is then read too, so that the connection can be reused."""
        if response.status not in (404, 410):
            return False
        self.end(response)
        return True

    def discard(self, response: Response) -> None:
        """Closes the connection of an HTTP response that was not read to its end, since it cannot be reused;
        that of one read to its end stays open for other requests."""
        response.close()
        response.release_conn()

    def close(self) -> None:
        self._closed = True
        with self._guard:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError, AttributeError):
                # This wakes a thread that waits for the socket; close does not.
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._manager.clear()

    def _keep(self, connection: TimedConnection) -> None:
        """Registers a connection of the client, so that `close` can close it from another thread."""
        with self._guard:
            self._connections.add(connection)

    def _once(
        self, method: str, target: str, headers: Mapping[str, str], source: BinaryIO | None
    ) -> Response:
        if self._closed:
            raise OSError
        if source is not None:
            source.seek(0)
        return self._manager.urlopen(
            method,
            f"{self._address}{target}",
            body=source,
            headers={"User-Agent": "mlcbuild", "Accept-Encoding": "identity", **headers},
            timeout=self.timeout,
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )

    def _pace(self, share: int) -> tuple[Pace, int]:
        return Pace(self.timeout, SLOWEST / share), CHUNK if share == 1 else _SHORT

    def _read(self, response: Response, pace: Pace, most: int) -> bytes:
        try:
            data = response.read1(most)
        # The last two occur when another thread has closed the connection.
        except (*_BROKEN, ValueError, AttributeError) as error:
            if _is_timeout(error):
                kind = SlowError if pace.is_slow() else RemoteError
                raise kind(f"it sent nothing for {self.timeout:.0f} seconds") from None
            raise RemoteError("the run ends" if self._closed else _words(error)) from None
        pace.add(len(data))
        return data

    def _reason(self, error: Exception) -> RemoteError:
        """Returns, without raising it, the RemoteError for a failed HTTP request: SlowError after a timeout,
        `_FinalError` if a retry cannot help. Its message continues a sentence, such as "it does not
        answer"."""
        causes = list(_chain(error))
        invalid = next((cause for cause in causes if isinstance(cause, ssl.SSLCertVerificationError)), None)
        if invalid is not None:
            return _FinalError(
                f"its certificate is not valid: {invalid.verify_message}; if an authority of your own has "
                "signed it, name that one's certificate in $SSL_CERT_FILE"
            )
        words = "it does not answer" if _is_timeout(error) else _words(error)
        if self._proxy is not None and _is_of_proxy(error, _address(self._proxy)):
            return _FinalError(f"the proxy {self._proxy.hostname}: {words}")
        return SlowError(words) if _is_timeout(error) else RemoteError(words)


class _FinalError(RemoteError):
    """The error for a failed HTTP request that no retry can fix."""


def status_words(status: int, code: str = "") -> str:
    """Returns a description of an unexpected HTTP status and of the server's error code, such as "it is full
    (status 507)". code: "" if the server stated none."""
    words = f"status {status}, {code}" if code else f"status {status}"
    if 300 <= status < 400:
        return f"it redirects clients ({words}): write the final address into the recipe"
    if status in _FULL:
        return f"it is full ({words})"
    return f"it answered with {words}"


@cache
def _context(chosen: str) -> ssl.SSLContext:
    """Returns a TLS context. chosen: path of a file with certificates, or "" for those of the system. Raises
    RemoteError if the file, which $SSL_CERT_FILE names, is missing or has no certificate in PEM form; Python
    would ignore that."""
    if chosen and not Path(chosen).is_file():
        raise RemoteError(f"$SSL_CERT_FILE names {chosen}, which is not a file")
    try:
        return ssl.create_default_context(cafile=chosen or None)
    except ssl.SSLError:
        raise RemoteError(f"$SSL_CERT_FILE names {chosen}, which holds no certificate in PEM form") from None


def _proxy(parts: SplitResult) -> SplitResult | None:
    """Returns the URL of the proxy for a server, from the environment: HTTPS_PROXY or HTTP_PROXY by the
    server's scheme; None without a proxy, or if NO_PROXY excludes the server. Raises RemoteError for anything
    but an http proxy with a valid address."""
    setting = urllib.request.getproxies().get(parts.scheme)
    if not setting or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    try:
        proxy = urlsplit(setting if "://" in setting else f"http://{setting}")
        setting.encode()  # raises ValueError for a variable that is not UTF-8
        usable = proxy.scheme == "http" and proxy.hostname and proxy.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise RemoteError("the proxy in the environment must be http://host:port")
    return proxy


def _address(proxy: SplitResult) -> str:
    return f"http://{proxy.netloc.rpartition('@')[2]}"


def _login(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": basic(login)}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and its causes, outermost first. The cause of an exception is the last exception in
    its `args`, where urllib3 stores it, or else its `__cause__`."""
    while error is not None:
        yield error
        inner = (item for item in reversed(error.args) if isinstance(item, BaseException))
        error = next(inner, None) or error.__cause__


def _is_timeout(error: BaseException) -> bool:
    causes = list(_chain(error))
    if isinstance(causes[-1], OSError):  # urllib3 reports a refused connection as a timeout, too.
        return isinstance(causes[-1], TimeoutError)
    return any(isinstance(cause, urllib3.exceptions.TimeoutError) for cause in causes)


def _is_of_proxy(error: Exception, proxy: str) -> bool:
    """Returns True if the proxy, and not the server behind it, caused the error of a request. proxy: its
    address, http://host:port."""
    refused = any(re.match("Tunnel connection failed", str(cause)) for cause in _chain(error))
    return refused or isinstance(error, urllib3.exceptions.ProxyError) or getattr(error, "url", None) == proxy


def _words(error: BaseException) -> str:
    causes = list(_chain(error))
    first = causes[-1]
    if any(isinstance(cause, http.client.IncompleteRead) for cause in causes):
        return "its answer ended early"
    if isinstance(first, http.client.RemoteDisconnected):
        return "it closed the connection"
    if isinstance(first, http.client.HTTPException | urllib3.exceptions.InvalidHeader):
        return f"its answer is not HTTP ({type(first).__name__})"
    if refused := re.match(r"Tunnel connection failed: ([0-9]{3})", str(first)):
        return f"it refuses the connection (status {refused[1]})"
    return (first.strerror if isinstance(first, OSError) else None) or type(first).__name__
