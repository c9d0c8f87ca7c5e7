"""Servers that begin an answer and never end it, and directories whose file server does not respond, for
tests."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.caches import Cache, Handler, serving

TIMEOUT = 0.6
"""Timeout of remotes in seconds. Servers in these tests send something more often than that, so that no
single read exceeds it."""


DROP = 0.05


LONG = 60
"""A number of seconds that no test reaches, on however busy a machine, unless something waits for ever."""


class Endless:
    """A function that makes a simulated server faulty: the server sends the beginning `begin` of an answer,
    and then `rest` every `pause` seconds (0: without pauses) until the test ends."""

    def __init__(self, begin: bytes, rest: bytes, pause: float = DROP) -> None:
        self.begin, self.rest, self.pause = begin, rest, pause
        self.over = threading.Event()

    def __call__(self, handler: Handler) -> bool:
        handler.close_connection = True
        handler.wfile.write(self.begin)
        while not self.over.wait(self.pause) if self.pause else not self.over.is_set():
            handler.wfile.write(self.rest)
        return True


OK = b"HTTP/1.1 200 OK\r\n"


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


ENDLESS: dict[str, tuple[bytes, bytes, float]] = {
    "silence": (b"", b"", DROP),
    "status line": (b"H", b"T", DROP),
    "header": (OK + b"X: ", b"a", DROP),
    "headers": (OK, b"X: a\r\n", DROP),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", DROP),
    "fast continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0),
    "body": (OK + b"Content-Length: 3000000\r\n\r\n", b"x", DROP),
    "body without length": (OK + b"\r\n", b"x", DROP),
    "chunk size": (CHUNKED + b"1", b"0", DROP),
    "chunk extension": (CHUNKED + b"1;", b"a", DROP),
    "trailers": (CHUNKED + b"0\r\n", b"X: a\r\n", DROP),
    "fast trailers": (CHUNKED + b"0\r\n", b"X: a\r\n" * 1000, 0),
    "one byte": (OK + b"Content-Length: 3000000\r\n\r\nx", b"", DROP),
}


@contextmanager
def endless(name: str) -> Iterator[tuple[Cache, Endless]]:
    fault = Endless(*ENDLESS[name])
    with serving(fault) as cache:
        try:
            yield cache, fault
        finally:
            fault.over.set()


@contextmanager
def dead_mount(place: Path) -> Iterator[None]:
    """Mounts a FUSE file system whose server never answers, and yields its directory."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("/dev/fuse cannot be opened")
    options = f"fd={descriptor},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    try:
        if libc.mount(b"dead", os.fsencode(place), b"fuse", 0, options):
            pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.umount2(os.fsencode(place), 2)  # MNT_DETACH
    finally:
        os.close(descriptor)  # ends what waits for it
