"""Who may use a server. Imports nothing: the command line loads it before it knows whether to serve."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """Who may use a server, and for how long."""

    keys: tuple[str, ...] = ()
    """Bearer keys; none: everyone."""
    origins: tuple[str, ...] = ()
    """Origins whose pages may call the server (CORS); "*": all."""
    timeout: float | None = None
    """Seconds that a request may take."""
