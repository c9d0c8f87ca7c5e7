"""Refuses HTTP requests whose heads different servers would interpret differently, because of their
protocol, HTTP version, Host field or Transfer-Encoding."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\w:.%~-]+\])(?::[0-9]{0,5})?", re.ASCII)


_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")


def head_fault(target: bytes, headers: Sequence[tuple[bytes, bytes]], version: str, protocol: str) -> str:
    """Returns the reason why the head of a request must be refused, as an error message; "" if it is valid.

    target: the path or whole URL in the request line; headers: the fields, as (name in lower case, value);
    version: the version in the request line, such as "1.1"; protocol: the last word of the request line, such
    as "HTTP/1.1". The parser, which reports the version alone, also accepts RTSP and ICE."""
    if version not in ("1.0", "1.1"):
        return f"the request has the version HTTP/{version}: send it as HTTP/1.1"
    if protocol != f"HTTP/{version}":
        return f"the request's protocol is {protocol}: send it as HTTP/1.1"
    return _host_fault(target, headers, version) or _coding_fault(headers, version)


def _host_fault(target: bytes, headers: Sequence[tuple[bytes, bytes]], version: str) -> str:
    """Returns what is wrong with the Host fields of a request (RFC 9112, 3.2) as an error message; "" if they
    are valid: one field, a host name or address with or without a port, or none in HTTP/1.0. A whole URL as
    target must name the same host and port, because servers differ in which of the two they use."""
    hosts = [value for name, value in headers if name == b"host"]
    if not hosts and version != "1.0":
        return "the request has no Host: name the server, as in 'Host: localhost'"
    if len(hosts) > 1:
        return "the request has more than one Host: send one"
    if hosts and not _HOST.fullmatch(hosts[0]):
        return "the request's Host must be a host name or an address, with or without a port"
    url = _ABSOLUTE.match(target)
    if url and hosts and url[1].lower() != hosts[0].lower():
        return "the request's Host and its URL name different hosts: send the path only"
    return ""


def _coding_fault(headers: Sequence[tuple[bytes, bytes]], version: str) -> str:
    """Returns what is wrong with the Transfer-Encoding of a request; "" if it is absent or, in HTTP/1.1,
    `chunked` alone. The HTTP parser allows further codings before `chunked`, which nobody decodes. In
    HTTP/1.0 any Transfer-Encoding is wrong, since proxies that speak that version forward it without decoding
    (RFC 9112, 6.1)."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        return "a request of HTTP/1.0 cannot have a Transfer-Encoding: send HTTP/1.1 or a Content-Length"
    if all(coding.strip().lower() == b"chunked" for coding in codings):
        return ""
    return "the request's Transfer-Encoding must be 'chunked' alone: send the body without other codings"
