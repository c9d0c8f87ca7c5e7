"""Reads the bodies of requests: within limits, and large ones on a thread so that no other request waits."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from anyio import CancelScope, CapacityLimiter, to_thread
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe
from starlette.requests import Request

from mlcbuild_runtime.openai.body import parse_body

BODY_SECONDS = 60.0
"""Maximum seconds for receiving the body of a request, which is then refused (408)."""
SMALL = 32 << 10
"""Maximum bytes of a body that is parsed in the event loop, which takes 10 ms at worst. Larger bodies are
parsed on a thread, one at a time: 8 MiB may take a second and 150 MB of memory."""
FEW_VALUES = 1 << 13
"""Maximum number of JSON values, nested ones included, in a request body of more than SMALL bytes that is
processed at the same time as others; so many values take up to 0.6 MB of memory besides their texts. Larger
bodies with more values are processed one at a time."""
TURN_SECONDS = 30.0
"""Maximum seconds that a request body with more than FEW_VALUES JSON values waits for other such bodies,
which are processed one at a time: compiling their constraints may take long. The request is then refused
(503)."""
MAX_LARGE = 64 << 20
"""Maximum bytes of all request bodies together that are held in memory, not counting the first SMALL (32 KiB)
of each body. A request whose body exceeds it is refused (503)."""


def _trim() -> None:
    """Calls glibc's malloc_trim, which returns the memory of large bodies that were freed to the operating
    system; otherwise hundreds of megabytes would stay allocated. Without glibc it does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class BodyReader:
    """Receives and parses the bodies of HTTP requests, within limits for all of a server's
    requests together."""

    def __init__(self, most: int) -> None:
        """Creates an object that reads the bodies of HTTP requests for one server. most: maximum bytes of one
        body."""
        self._most, self._kept = most, 0
        self._parsing, self._processing = CapacityLimiter(1), CapacityLimiter(1)

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[dict[str, Json]]:
        """Yields the JSON object in the body of a request, as an async context manager: the body counts as
        held in memory until the context ends. Raises RequestError with status 400 (invalid content), 408 (too
        slow), 413 (too many bytes or JSON values), 415 (compressed) or 503 (too many large bodies at a time),
        and ClientDisconnect if the client disconnects before the end of the body."""
        coding = ", ".join(request.headers.getlist("content-encoding"))
        if coding.lower() not in ("", "identity"):
            raise RequestError(
                f"the body has the encoding {describe(coding)}: send it without a Content-Encoding",
                code="unsupported_encoding",
                status=415,
            )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._most:
            raise self._too_large()
        data = bytearray()
        try:
            await self._receive(request, data)
            if len(data) <= SMALL:
                yield parse_body(bytes(data))
            else:
                async with AsyncExitStack() as turn:
                    if sum(map(data.count, b",[{")) > FEW_VALUES:
                        await self._alone(turn)
                    try:
                        yield await self._parsed(bytes(data))
                    finally:
                        with CancelScope(shield=True):
                            await to_thread.run_sync(_trim)
        finally:
            self._kept -= max(0, len(data) - SMALL)

    async def _parsed(self, data: bytes) -> dict[str, Json]:
        async with self._parsing:
            return await to_thread.run_sync(parse_body, data)

    async def _alone(self, turn: AsyncExitStack) -> None:
        """Waits until no other request body with more than 8192 (FEW_VALUES) JSON values is being processed.
        Further such bodies then wait until the exit stack `turn` is closed. Raises RequestError (503) if the
        wait takes longer than 30 seconds (TURN_SECONDS)."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await turn.enter_async_context(self._processing)
        except TimeoutError:
            raise _overloaded() from None

    async def _receive(self, request: Request, data: bytearray) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    more = max(0, len(data) + len(part) - SMALL) - max(0, len(data) - SMALL)
                    if len(data) + len(part) > self._most:
                        raise self._too_large()
                    if self._kept + more > MAX_LARGE:
                        raise _overloaded()
                    self._kept += more
                    data += part
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive completely within {BODY_SECONDS:g} s", code="timeout", status=408
            ) from None

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body has more than {self._most} bytes", code="request_too_large", status=413
        )


def _overloaded() -> RequestError:
    return RequestError(
        "the server holds as many large bodies as it is allowed to: try again later",
        code="overloaded",
        status=503,
    )
