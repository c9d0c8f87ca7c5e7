"""Sends malformed or hostile requests to a server, and measures how much memory they cost it."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx

from . import shared
from .shared import Server

HOST = b"Host: localhost\r\n"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
MB = 1 << 20


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=shared.WAIT)


def answer(client: socket.socket) -> bytes:
    """Returns all bytes that the server sends until it closes the connection."""
    actual = b""
    with suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            actual += part
    return actual


def send(client: socket.socket, parts: Iterator[bytes]) -> int:
    """Sends bytes until the server stops accepting them, and returns their number."""
    count = 0
    with suppress(ConnectionResetError, BrokenPipeError):
        for part in parts:
            client.sendall(part)
            count += len(part)
    return count


def repeated(part: bytes, most: int = 64 * MB) -> Iterator[bytes]:
    block = part * max(1, (1 << 16) // len(part))
    for _ in range(most // len(block)):
        yield block


def resident(server: Server) -> float:
    """Returns the resident memory of the server process in MB."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MB


def post(server: Server, path: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{server.url}{path}", content=content, headers=headers, timeout=shared.WAIT, verify=shared.PLAIN
    )
