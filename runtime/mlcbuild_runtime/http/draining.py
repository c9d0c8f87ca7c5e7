"""Runs a server: accepts connections until a signal, and lets running requests finish."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from mlcbuild_runtime.http.accept import accept
from mlcbuild_runtime.http.connection import IDLE_SECONDS, Connection

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from mlcbuild_runtime.engine.served_models import Models

log = logging.getLogger(__name__)

GRACE = 1
"""Maximum seconds for which a stopping server, after draining, waits for the end of its open connections and
running handlers, before it cancels them."""
BACKLOG = 2048
"""Maximum number of connections that the system queues until they are accepted."""


def run(
    app: ASGIApp, models: Models, listener: socket.socket, drain: float, ready_line: Callable[[], str]
) -> None:
    """Serves a web application on a bound socket until SIGINT or SIGTERM.

    drain: seconds that running requests get to finish after SIGTERM, while new ones are refused (503). After
    SIGINT or a second signal, with 0, or if an engine has failed, running requests are ended at once with an
    error. ready_line: function that returns the line which is printed once the server accepts requests."""
    _ModelServer(app, models, listener, drain, ready_line).run(sockets=[listener])


class BoundedServer(uvicorn.Server):
    """A uvicorn server whose connections have all limits of `Connection`. At the maximum number of
    connections, a new one takes the place of the one that has been idle longest, or waits while none is idle.
    SIGINT and SIGTERM end the server."""

    def __init__(self, app: ASGIApp, listener: socket.socket, ready_line: Callable[[], str]) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            timeout_keep_alive=int(IDLE_SECONDS),
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)
        self._listener, self._ready_line = listener, ready_line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        make = partial(Connection, self.config, self.server_state, self.lifespan.state)
        self._accepting = asyncio.create_task(accept(self._listener, make, self.server_state.connections))
        self._announce()

    def _announce(self) -> None:
        """Prints the line that the server is ready. If standard output cannot be written, the server goes on
        with a warning in the log, and what it would still write there is dropped."""
        try:
            print(self._ready_line(), flush=True)  # noqa: T201
        except OSError as error:
            log.warning("standard output cannot be written: %s", error.strerror)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Requests the end of the server after a signal (SIGINT, SIGTERM); a second signal makes it end
        without waiting for connections. uvicorn's own method would raise the signal again afterwards."""
        self.force_exit = self.should_exit
        self.should_exit = True


class _ModelServer(BoundedServer):
    """A server that ends the engines before it shuts down, so that every open stream ends by itself."""

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        listener: socket.socket,
        drain: float,
        ready_line: Callable[[], str],
    ) -> None:
        super().__init__(app, listener, ready_line)
        self._models = models
        self._drain = drain
        self._was_idle = True
        """True if no request was running or waiting at the last check."""
        self._is_drain_requested = False
        """True after the first SIGTERM, if running requests may finish."""
        self._last_moment = math.inf
        """Time at which draining of the server ends, as time.monotonic returns it; infinity before draining
        begins."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._models.close(timeout=0)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: after SIGTERM running requests may finish within the time for draining, if it is
        not 0; SIGINT, or a second signal, ends them at once. It only notes what is to be done, for `on_tick`:
        the signal may interrupt code of this thread that holds a lock of the models or of an engine."""
        if sig == signal.SIGTERM and self._drain and not self._is_drain_requested:
            self._is_drain_requested = True
            return
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Drains the server after SIGTERM: new requests are refused (503), and the server reports that it is
        not ready. Returns True if the server must stop now: after another signal or, while draining, when no
        request is left or the time for running requests has passed. uvicorn calls it ten times per second. No
        request counts as left if two checks in a row find none: between two parts of a request for many
        embeddings, the engine has nothing to do."""
        if self._is_drain_requested and self._last_moment == math.inf:
            self._begin_draining()
        state, was_idle = self._models.state(), self._was_idle
        self._was_idle = not (state.running or state.waiting)
        if (self._was_idle and was_idle) or time.monotonic() > self._last_moment:
            self.should_exit |= self._last_moment < math.inf
        return await super().on_tick(counter)

    def _begin_draining(self) -> None:
        if self._models.ready:
            self._models.drain()
            self._last_moment = time.monotonic() + self._drain
        else:
            self.should_exit = True
