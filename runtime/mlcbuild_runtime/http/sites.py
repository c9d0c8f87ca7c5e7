"""Protects a server without API keys from web pages, since any page that a browser shows can send requests to
this machine. Requests are refused by their Host and Origin headers."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import describe
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlcbuild_runtime.http.error_responses import error_document


def is_loopback(name: str) -> bool:
    """Returns True if a host name in lower case, or an address without brackets, belongs to the loopback
    interface: "localhost", names that end with ".localhost", 127.0.0.0/8 and ::1."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Returns the host in the value of a Host header in lower case, without the port: a name without final
    dots, or the IPv6 address between the brackets. The value is not checked: an invalid one raises nothing.
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


class Sites:
    """ASGI middleware that refuses (403) requests whose Host is neither of the loopback interface nor a
    listed name (DNS rebinding), and those from web pages whose origin is neither this server nor listed.
    Several Host or Origin headers in one request get 400."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        """Creates the middleware that checks the Host and Origin headers of requests. hosts: host names that
        requests may address besides those of the loopback interface. origins: origins of web pages that may
        send requests besides the server's own, such as "https://example.org"; "*" among them allows all."""
        self._app, self._hosts, self._origins = app, {host_name(host) for host in hosts}, set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._fault(Headers(scope=scope)) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        await JSONResponse(error_document(scope["path"], error), error.status)(scope, receive, send)

    def _fault(self, headers: Headers) -> RequestError | None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) > 1 or len(origins) > 1:
            return RequestError("a request has one Host and one Origin at most")
        for host in hosts:
            name = host_name(host)
            if not is_loopback(name) and name not in self._hosts:
                return RequestError(
                    f"this server has no key and is for this machine only, but the request asks for the host"
                    f" {describe(host)}: start it with --allowed-host, or with --api-key",
                    code="host_not_allowed",
                    status=403,
                )
        for origin in origins:
            is_same_host = origin.partition("://")[2].lower() in [host.lower() for host in hosts]
            if not is_same_host and not {"*", origin} & self._origins:
                return RequestError(
                    f"a page of {describe(origin)} may not use this server: start it with --cors for that"
                    " origin, or with --api-key",
                    code="origin_not_allowed",
                    status=403,
                )
        return None
