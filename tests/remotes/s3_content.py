"""Objects in S3 that several tests read."""

from __future__ import annotations

from mlcbuild.remotes.transport import Transport

NAME = "cas/" + "5" * 64


def content(transport: Transport, name: str, start: int = 0) -> bytes:
    body = transport.open(name, start)
    assert body is not None and body.start == start
    with body:
        return b"".join(bytes(data) for data in iter(body.read, b""))  # the buffer is filled anew


SIZE = 20_000_000
