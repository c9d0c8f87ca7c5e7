"""The middleware of the HTTP server, in the order that requests pass: access logs, the check of the Host and
Origin headers, CORS, and the check of API keys; all but the logs only if the server's rules require them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.accesslog import AccessLog, Form
from mlcbuild_runtime.http.keys import Keys
from mlcbuild_runtime.http.sites import Sites


def wrapped(app: ASGIApp, access: Access, access_logs: Sequence[tuple[TextIO, Form]]) -> ASGIApp:
    """Returns an application that passes requests through the server's middleware to `app`, which handles its
    exceptions itself. Starlette's own parameter for middleware is not used: its answer to a defect (500)
    would bypass the middleware, and lack the request's id and the fields of CORS. access: rules for access;
    access_logs: (stream, form of the lines) of each access log."""
    for layer in reversed(stack(access, access_logs)):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app


def stack(access: Access, access_logs: Sequence[tuple[TextIO, Form]]) -> list[Middleware]:
    """Returns the middleware that requests pass on their way to the endpoints, the outermost first: the
    access logs and, as far as the rules `access` require them, the check of the Host and Origin headers,
    CORS, and the check of API keys. access_logs: (stream, form of the lines) of each access log."""
    layers = [Middleware(AccessLog, out=out, form=form) for out, form in access_logs]
    if access.hosts is not None:
        layers.append(Middleware(Sites, hosts=access.hosts, origins=access.origins))
    if access.origins:
        # CORS comes before the keys, since a browser's preflight request has no key.
        every = ["*"]
        layers.append(
            Middleware(CORSMiddleware, allow_origins=access.origins, allow_methods=every, allow_headers=every)
        )
    if access.keys:
        layers.append(Middleware(Keys, keys=access.keys))
    return layers
