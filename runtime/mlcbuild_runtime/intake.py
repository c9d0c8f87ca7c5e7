"""Bodies of requests, as they come in."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from mlcbuild_runtime.body import parse_body
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.fields import Json, describe

BODY_SECONDS = 60.0
"""That a body may take to come."""


async def read(request: Request, most: int) -> dict[str, Json]:
    """The body, a JSON object of at most so many bytes. Raises RequestError: 413, 415, 408, or 400 for what
    is in it."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise RequestError(
            f"the body has the encoding {describe(coding)}: send it as it is",
            code="unsupported_encoding",
            status=415,
        )
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise RequestError(
                        f"the body has more than {most} bytes", code="request_too_large", status=413
                    )
                parts.append(part)
    except TimeoutError:
        raise RequestError(
            f"the body did not come to its end within {BODY_SECONDS:g} s", code="timeout", status=408
        ) from None
    return parse_body(b"".join(parts))
