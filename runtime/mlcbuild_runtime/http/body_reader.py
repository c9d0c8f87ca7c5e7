"""Bodies of requests, as they come in: bounded before they are kept, and read where nobody waits for it."""

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
"""That a body may take to come."""
SMALL = 32 << 10
"""Bytes of a body that is read in the event loop: 10 ms at worst. Larger ones are read on a thread, one at a
time: 8 MiB may take a second and 150 MB."""
MAX_LARGE = 64 << 20
"""Bytes of all bodies together that are kept at a time, the first SMALL of each aside."""


def _trim() -> None:
    """Gives free memory back to the system: glibc keeps hundreds of megabytes after many large bodies. Other
    C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Intake:
    """The bodies of one server."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of one body."""
        self._most, self._kept, self._lane = most, 0, CapacityLimiter(1)

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[dict[str, Json]]:
        """The body, a JSON object; it counts as kept until the context ends. Raises RequestError: 413, 415,
        408, 503, or 400 for what is in it."""
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
