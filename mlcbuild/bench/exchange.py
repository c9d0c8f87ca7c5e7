"""Performs one HTTP exchange on a separate connection, and records the arrival time of each piece of the
answer.

While answers arrive, the load generator only reads them and notes the time; the bytes are parsed afterwards.
So it takes little CPU time from a server on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import urlsplit

from mlcbuild.canon import Json
from mlcbuild.errors import MlcbuildError, UsageError

LONGEST_HEAD = 1 << 16
"""Maximum size in bytes of the status line and headers of an HTTP response; longer ones raise
ExchangeError."""
LARGEST_BODY = 64 << 20
"""Maximum size in bytes of the body of an HTTP response; longer ones raise ExchangeError."""


class ExchangeError(MlcbuildError):
    """The error for an HTTP exchange with the measured server that failed. `kind` is the word under which a
    load test counts such errors: "connect" (the server cannot be reached), "cut" (the answer ended early) or
    "malformed" (the answer is not HTTP/1.1, or too large)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Server:
    """The address of an OpenAI-compatible server, and the API key to send."""

    host: str
    port: int
    tls: bool
    path: str
    """The path in the URL of an OpenAI-compatible server, before /v1, such as "/api"; "" if there is none."""
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Server:
        """Returns the address of a server from a URL http://HOST[:PORT][/PATH][/v1], or one with https.
        Without a port it is 80, or 443 for https; a user name, a query and a fragment are ignored. key: the
        API key to send, or None. Raises UsageError for any other text, and for a key with unprintable
        characters.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"mlcbuild bench: '{url}' is not a URL such as http://127.0.0.1:8000")
        if key is not None and not key.isprintable():
            raise UsageError("mlcbuild bench: the key has characters that no header can have")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, path, key)

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def head(self, path: str, body: bytes | None) -> bytes:
        """Returns the request line and headers of an HTTP request, with the blank line that ends them, as
        bytes. path: the endpoint, such as /v1/models, which follows the server's own path; body: the body of
        a POST, or None for GET."""
        lines = [
            f"{'GET' if body is None else 'POST'} {self.path}{path} HTTP/1.1",
            f"Host: {self.name}",
            "Connection: close",
            "Accept: application/json, text/event-stream",
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass(frozen=True)
class TimedReply:
    """A complete HTTP answer of a server, with the time at which each piece of its body arrived."""

    status: int
    pieces: tuple[tuple[float, bytes], ...]
    """Pieces of the answer's body in order, as (arrival time in seconds of time.perf_counter, bytes)."""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Yields each server-sent event of an HTTP answer as (arrival time of the event's last byte in
        seconds of time.perf_counter, its data as bytes: the texts after `data:`, joined by newlines). Other
        fields are ignored, and so is a last event without the blank line that ends it."""
        left, data = b"", list[bytes]()
        for moment, piece in self.pieces:
            *lines, left = (left + piece).split(b"\n")
            for raw in lines:
                line = raw.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].lstrip(b" "))
                elif not line and data:
                    yield moment, b"\n".join(data)
                    data = []


async def exchange(server: Server, path: str, document: Mapping[str, Json] | None = None) -> TimedReply:
    """Sends one HTTP request, a POST with a JSON document or a GET if the document is None, and returns the
    complete answer, whatever its status, for which it waits without limit. Raises ExchangeError if the server
    cannot be reached, or its answer is incomplete, too large or not HTTP/1.1.
    """
    async with answering(server, path, document) as (status, pieces):
        return TimedReply(status, tuple([piece async for piece in pieces]))


@asynccontextmanager
async def answering(
    server: Server, path: str, document: Mapping[str, Json] | None = None
) -> AsyncIterator[tuple[int, AsyncIterator[tuple[float, bytes]]]]:
    """Sends an HTTP request, a POST with a JSON document or a GET if the document is None, and returns an
    asynchronous context that yields (status, iterator of the body's pieces as (arrival time in seconds of
    time.perf_counter, bytes)). Leaving the context, also early, closes the connection.

    Raises ExchangeError if the server cannot be reached, or its answer is incomplete, too large or not
    HTTP/1.1; while the body is read, too. An OSError or a ValueError that the caller's code in the context
    raises becomes an ExchangeError as well."""
    body = None if document is None else json.dumps(document, ensure_ascii=False).encode()
    context = _certificates() if server.tls else None
    try:
        reader, writer = await asyncio.open_connection(
            server.host, server.port, ssl=context, limit=LONGEST_HEAD
        )
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is no name
        why = getattr(error, "strerror", None) or str(error)
        raise ExchangeError("connect", f"{server.name} cannot be reached: {why}") from None
    try:
        writer.write(server.head(path, body) + (body or b""))
        status, headers = _parse(await reader.readuntil(b"\r\n\r\n"))
        async with aclosing(_pieces(reader, headers)) as pieces:
            yield status, pieces
    except (asyncio.IncompleteReadError, OSError):
        raise ExchangeError(
            "cut", f"{server.name} closed the connection before the end of its answer"
        ) from None
    except (asyncio.LimitOverrunError, ValueError):
        raise ExchangeError("malformed", f"{server.name} sent an answer that is not HTTP/1.1") from None
    finally:
        writer.close()


@cache
def _certificates() -> ssl.SSLContext:
    """Returns the context of TLS connections, with the system's certificates. The first call creates it, and
    later calls return the same: reading the certificates takes up to a tenth of a second, in which no answer
    of other requests is read."""
    return ssl.create_default_context()


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    """Returns (status as an integer, headers) of an HTTP response; headers are name -> value, both in lower
    case, of repeated ones the last. head: its bytes before the body. Raises ValueError if they are not those
    of a response."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status, *_ = first.split(" ", 2)
    if not version.startswith("HTTP/1."):
        raise ValueError(first)
    pairs = (line.partition(":") for line in lines if line)
    return int(status), {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


async def _pieces(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncGenerator[tuple[float, bytes], None]:
    """Yields the body of an HTTP response piece by piece, as (arrival time in seconds of time.perf_counter,
    bytes). Without a length in `headers`, the body lasts until the server closes the connection. Raises
    asyncio.IncompleteReadError when the body ends early, OSError when the connection breaks, ExchangeError
    when the body is too large, ValueError for a length or a chunk size that is no number, and
    asyncio.LimitOverrunError for an endless chunk size."""
    came = 0
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            came = _counted(came, size)
            data = await reader.readexactly(size + 2)
            yield time.perf_counter(), data[:-2]
        return
    length = int(headers["content-length"]) if "content-length" in headers else None
    while length is None or came < length:
        data = await reader.read(1 << 16)
        if not data:
            if length is not None:
                raise asyncio.IncompleteReadError(b"", length - came)
            return
        came = _counted(came, len(data))
        yield time.perf_counter(), data


def _counted(came: int, size: int) -> int:
    """Returns `came`, the size in bytes of an HTTP body so far, plus `size`, that of the next piece. Raises
    ExchangeError if the sum is above LARGEST_BODY."""
    if came + size > LARGEST_BODY:
        raise ExchangeError("malformed", f"the server sent a body of more than {LARGEST_BODY} bytes")
    return came + size
