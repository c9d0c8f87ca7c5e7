"""Tests of dividing received bytes into requests, in whatever pieces they arrive."""

from __future__ import annotations

import random

import pytest
from mlcbuild_runtime.http.request_input import HEAD_BYTES, HEAD_FIELDS, RequestInput

HEAD = b"POST /v1 HTTP/1.1\r\nHost: a\r\n\r\n"
BODY = b"12\n\n45"
"""Content of a request body. Its empty line must not count as the end of a head."""


def taken(pieces: list[bytes]) -> list[bytes]:
    """Returns the parts into which the parser divides two requests on one connection: head, body, head, body.
    Each body is BODY, with a Content-Length. pieces: the bytes as they arrive."""
    source, parts, part = RequestInput(), list[bytes](), b""
    for piece in pieces:
        source.receive(piece)
        while not source.is_parsed:
            part += source.take()
            if not source.in_body and part.endswith(b"\r\n\r\n"):
                parts.append(part)
                part = b""
                source.end_head([(b"content-length", b"%d" % len(BODY))])
            elif source.in_body and len(part) == len(BODY):
                source.add_body(len(part))
                parts.append(part)
                part = b""
                source.end()
                source.begin()
    return parts


@pytest.mark.parametrize("seed", range(20))
def test_the_parser_gets_bytes_up_to_the_end_of_a_head_or_body(seed: int) -> None:
    stream, chooser = (HEAD + BODY) * 2, random.Random(seed)
    cuts = sorted(chooser.sample(range(1, len(stream)), 12))
    pieces = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert taken(pieces) == [HEAD, BODY] * 2
    assert taken([stream]) == [HEAD, BODY] * 2


def test_a_head_is_limited_in_bytes_and_fields() -> None:
    source = RequestInput()
    source.receive(b"a" * HEAD_BYTES)
    source.take()
    assert not source.is_head_too_large
    source.receive(b"a")
    source.take()
    assert source.is_head_too_large
    assert [source.add_field() for _ in range(HEAD_FIELDS + 1)] == [True] * HEAD_FIELDS + [False]


def test_a_body_may_not_be_mostly_framing() -> None:
    """Checks the limit of chunked encoding: chunks of one byte, each with five bytes of framing, are
    accepted, but long chunk extensions are not."""
    source = RequestInput()
    source.end_head([])
    for _ in range(HEAD_BYTES):
        source.receive(b"1\r\nx\r\n")
        source.take()
        source.add_body(1)
    assert not source.is_body_too_fragmented
    source.receive(b"1;" + b"x" * 3 * HEAD_BYTES)
    source.take()
    assert source.is_body_too_fragmented


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_the_protocol_is_the_last_word_of_the_first_line(size: int) -> None:
    """Checks the protocol of two requests on one connection, of which `size` bytes arrive at a time."""
    source = RequestInput()
    for line, protocol in ((b"GET /a b RTSP/1.0", "RTSP/1.0"), (b"GET /" + b"a" * 99, "a" * 9)):
        head = b"\r\n\n\r\n" + line + b"\r\nTo: HTTP/1.1\r\n\r\n"
        for at in range(0, len(head), size):
            source.add_head(head[at : at + size])
        assert source.protocol == protocol
        source.end()


def test_discarded_bytes_are_gone() -> None:
    source = RequestInput()
    source.receive(HEAD)
    source.discard()
    assert source.is_parsed
    source.receive(BODY)
    assert not source.is_parsed
