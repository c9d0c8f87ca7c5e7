"""Tests of request heads whose Host or Transfer-Encoding servers interpret differently."""

from __future__ import annotations

import pytest
from mlcbuild_runtime.http.host_field import head_fault

HOST = (b"host", b"localhost:8000")


@pytest.mark.parametrize(
    ("target", "headers", "version"),
    [
        (b"/v1/models", [HOST], "1.1"),
        (b"/", [], "1.0"),
        (b"/", [(b"host", b"[::1]:80")], "1.1"),
        (b"/", [(b"host", b"")], "1.1"),
        (b"http://LOCALHOST:8000/x?y", [HOST], "1.1"),
        (b"/http://elsewhere/", [HOST], "1.1"),
        (b"/", [HOST, (b"transfer-encoding", b" Chunked ")], "1.1"),
    ],
)
def test_heads_that_all_servers_understand(
    target: bytes, headers: list[tuple[bytes, bytes]], version: str
) -> None:
    assert head_fault(target, headers, version, f"HTTP/{version}") == ""


@pytest.mark.parametrize(
    ("target", "headers", "words"),
    [
        (b"/", [], "the request has no Host: name the server, as in 'Host: localhost'"),
        (b"/", [HOST, HOST], "the request has more than one Host: send one"),
        (b"/", [(b"host", b"a b")], "the request's Host must be a host name or an address"),
        (b"/", [(b"host", b"a/b")], "the request's Host must be a host name or an address"),
        (b"/", [(b"host", b"a:port")], "the request's Host must be a host name or an address"),
        (b"http://elsewhere/x", [HOST], "the request's Host and its URL name different hosts"),
        (b"/", [HOST, (b"transfer-encoding", b"gzip, chunked")], "must be 'chunked' alone"),
        (b"/", [HOST, (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"x")], "must be 'chunked'"),
    ],
)
def test_heads_that_servers_understand_differently(
    target: bytes, headers: list[tuple[bytes, bytes]], words: str
) -> None:
    assert words in head_fault(target, headers, "1.1", "HTTP/1.1")


@pytest.mark.parametrize(
    ("version", "headers", "words"),
    [
        ("0.9", [], "the request has the version HTTP/0.9: send it as HTTP/1.1"),
        ("2.0", [HOST], "the request has the version HTTP/2.0: send it as HTTP/1.1"),
        ("1.0", [(b"transfer-encoding", b"chunked")], "HTTP/1.0 cannot have a Transfer-Encoding"),
    ],
)
def test_versions_and_what_they_lack(version: str, headers: list[tuple[bytes, bytes]], words: str) -> None:
    assert words in head_fault(b"/", headers, version, f"HTTP/{version}")


@pytest.mark.parametrize("protocol", ["RTSP/1.0", "ICE/1.0", "/", ""])
def test_other_protocols_are_refused(protocol: str) -> None:
    words = f"the request's protocol is {protocol}: send it as HTTP/1.1"
    assert head_fault(b"/", [HOST], "1.0", protocol) == words
