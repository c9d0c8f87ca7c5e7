"""Who may use a server. Imports nothing: the command line loads it before it knows whether to serve."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """Who may use a server, and how much of it."""

    keys: tuple[str, ...] = ()
    """Bearer keys; none: everyone."""
    origins: tuple[str, ...] = ()
    """Origins whose pages may call the server (CORS); "*": all."""
    timeout: float | None = None
    """Seconds that a request may take."""
    max_body: int = 8 << 20
    """Bytes of a request's body."""
    hosts: tuple[str, ...] | None = None
    """Names that a request may ask for in its Host, besides those of the loopback interface; None: any, and
    pages of any origin may send requests, too."""
    max_tokens: int | None = None
    """Tokens that an answer may have; None: what the context has room for."""
