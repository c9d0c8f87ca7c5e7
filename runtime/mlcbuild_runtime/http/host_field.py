"""Checks the Host fields of requests (RFC 9112, 3.2)."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\w:.%~-]+\])(?::[0-9]{0,5})?", re.ASCII)


def host_fault(headers: Sequence[tuple[bytes, bytes]], version: str) -> str:
    """Returns the reason why the Host fields of a request must be refused (RFC 9112, 3.2); "" if they are
    valid.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if not hosts and version != "1.0":
        return "the request has no Host: name the server, as in 'Host: localhost'"
    if len(hosts) > 1:
        return "the request has more than one Host: send one"
    if hosts and not _HOST.fullmatch(hosts[0]):
        return "the request's Host must be a host name or an address, with or without a port"
    return ""
