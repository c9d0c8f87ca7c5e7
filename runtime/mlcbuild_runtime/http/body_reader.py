"""Reads the bodies of requests: within limits, and large ones on a thread so that no other request waits."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import CapacityLimiter, to_thread
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe
from starlette.requests import Request

from mlcbuild_runtime.openai.body import parse_body

BODY_SECONDS = 60.0
"""Maximum seconds for receiving the body of a request."""
SMALL = 32 << 10
"""Maximum bytes of a body that is parsed in the event loop, which takes 10 ms at worst. Larger bodies are
parsed on a thread, one at a time: 8 MiB may take a second and 150 MB of memory."""
MAX_LARGE = 64 << 20
"""Maximum bytes of all bodies together that are held in memory, not counting the first SMALL of each."""


def _trim() -> None:
    """Returns free memory to the system with glibc's malloc_trim, without which hundreds of megabytes stay
    allocated after many large bodies."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class BodyReader:
    """Receives and parses the bodies of one server."""

    def __init__(self, most: int) -> None:
        """Prepares reading bodies. `most`: maximum bytes of one body."""
        self._most, self._kept, self._lane = most, 0, CapacityLimiter(1)

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[dict[str, Json]]:
        """Returns the body, a JSON object, as a context: its memory is counted until the context ends. Raises
        RequestError with status 408, 413, 415 or 503, or 400 for invalid content."""
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise RequestError(
                f"the body has the encoding {describe(coding)}: send it as it is",
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
                async with self._lane:
                    try:
                        yield await to_thread.run_sync(parse_body, bytes(data))
                    finally:
                        await to_thread.run_sync(_trim)
        finally:
            self._kept -= max(0, len(data) - SMALL)

    async def _receive(self, request: Request, data: bytearray) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    more = max(0, len(data) + len(part) - SMALL) - max(0, len(data) - SMALL)
                    if len(data) + len(part) > self._most:
                        raise self._too_large()
                    if self._kept + more > MAX_LARGE:
                        raise RequestError(
                            "the server holds as many large bodies as it may: try later",
                            code="overloaded",
                            status=503,
                        )
                    self._kept += more
                    data += part
        except TimeoutError:
            raise RequestError(
                f"the body did not come to its end within {BODY_SECONDS:g} s", code="timeout", status=408
            ) from None

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body has more than {self._most} bytes", code="request_too_large", status=413
        )
