"""Defines the rules for access to a server. It imports no other module of the runtime, because the command
line loads it early."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """The rules of a server for access: which clients may use it, and how large their requests may be."""

    keys: tuple[str, ...] = ()
    """API keys of which each request must have one, except for health checks, the chat page, /docs and
    /openapi.json; () means that no key is required."""
    origins: tuple[str, ...] = ()
    """Origins whose web pages may call the server (CORS); "*" stands for all."""
    timeout: float | None = None
    """Maximum seconds from the arrival of a request's head to the end of its answer, including the time in
    which its body arrives and its model is loaded; then it ends with an error (504). None means no limit."""
    max_body: int = 8 << 20
    """Maximum bytes of a request's body; a larger one is refused (413)."""
    hosts: tuple[str, ...] | None = None
    """Host names that requests may address besides those of the loopback interface. None allows any host, and
    requests from web pages of any origin."""
    max_tokens: int | None = None
    """Maximum tokens of an answer; None means as many as fit the context."""
    lenient: bool = False
    """True if fields of a request body that are unknown or not supported are dropped, with a line in the log.
    Otherwise the request is refused."""
