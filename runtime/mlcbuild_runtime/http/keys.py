"""Refuses (401) HTTP requests without one of the server's API keys, in `Authorization: Bearer KEY` or
`X-API-Key`. Health checks, the chat page and the description of the API need none."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from mlcbuild_format.errors import RequestError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlcbuild_runtime.http.error_responses import error_document

_OPEN = ("/", "/docs", "/openapi.json", "/ping")
"""Paths that need no key, besides those that begin with /health."""


class Keys:
    """ASGI middleware that refuses (401) HTTP requests without one of the server's API keys, in the header
    `Authorization: Bearer KEY` or, if that is absent or holds no key of any scheme, in `X-API-Key`. Health
    checks (/ping, and paths that begin with /health), the chat page, and the description of the API (/docs
    and /openapi.json) need no key: they reveal nothing, and the chat page asks its user for the key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_listed = scope["type"] == "http" and scope["path"] in _OPEN
        is_open = scope["type"] != "http" or is_listed or scope["path"].startswith("/health")
        if is_open or self._opened_by(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "this server needs a key: send the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            status=401,
        )
        headers = {"WWW-Authenticate": "Bearer"}
        document = error_document(scope["path"], error)
        await JSONResponse(document, error.status, headers=headers)(scope, receive, send)

    def _opened_by(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if b"x-api-key" in headers and not key:  # Anthropic's clients send the key in this form.
            kind, key = b"bearer", headers[b"x-api-key"]
        # Every key is compared, each in constant time, so that the time reveals nothing about the keys.
        same = [hmac.compare_digest(key.strip(), own_key) for own_key in self._keys]
        return kind.lower() == b"bearer" and any(same)
