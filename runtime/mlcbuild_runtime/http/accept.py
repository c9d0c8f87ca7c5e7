"""Accepts connections on a listening socket, up to the limit of file descriptors.

asyncio's server keeps retrying when a process has no file descriptor left, and logs a traceback for each
attempt (CPython 3.11: thousands a second).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable, Collection

from mlcbuild_runtime.http.connection import Connection

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
RETRY = 0.05
"""Seconds between two attempts to accept a connection while the maximum number of connections is open, or the
process has no file descriptor or memory left."""
QUIET = 60.0
"""Minimum seconds between two log lines which report that there is no room for another connection."""
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def room() -> int:
    """Returns the maximum number of connections that the server accepts: 4096, or the process's limit of file
    descriptors minus 64, or half of that limit, if the larger of these two is less than 4096."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if most < 0 else min(MAX_CONNECTIONS, max(most - 64, most // 2))


async def accept(
    listener: socket.socket, make: Callable[[], Connection], connections: Collection[object]
) -> None:
    """Accepts connections on a listening socket until the task is cancelled.

    make: creates the protocol of a connection. connections: the open connections, to which each new one adds
    itself. When the maximum number (the function `room` returns it) is open, the connection that has been
    idle for longest is closed; while none is idle, new ones wait. The same happens while the process has no
    file descriptor or memory left. At most one line a minute reports it in the log."""
    loop = asyncio.get_running_loop()
    opening: set[asyncio.Task[object]] = set()
    most, logged_at = room(), -QUIET

    def full(reason: str) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at >= QUIET:
            logged_at = time.monotonic()
            log.error("%d connections are open, and there is no room for more: %s", len(connections), reason)

    while True:
        while len(connections) + len(opening) >= most:
            full(f"idle ones are closed, others wait (limit {most})")
            if not _drop_idle(connections):
                await asyncio.sleep(RETRY)
            else:
                await asyncio.sleep(0)
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno in _FULL:
                full(str(error.strerror))
                _drop_idle(connections)
                await asyncio.sleep(RETRY)
            continue
        opened: asyncio.Task[object] = asyncio.create_task(_open(make, accepted))
        opening.add(opened)
        opened.add_done_callback(opening.discard)


async def _open(make: Callable[[], Connection], accepted: socket.socket) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(make, accepted)
    except OSError:  # The client has disconnected already.
        accepted.close()


def _drop_idle(connections: Collection[object]) -> bool:
    """Closes the connection that has been idle for longest; returns False if none of
    `connections` is idle."""
    idle = [(c.idle_since, id(c), c) for c in connections if isinstance(c, Connection) and c.is_idle]
    if not idle:
        return False
    min(idle)[2].drop()
    return True
