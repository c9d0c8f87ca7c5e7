"""Requests tokens from the token service that a registry names, by Docker's protocol for them
(https://distribution.github.io/distribution/spec/auth/token) or, with a refresh token, by OAuth 2."""

from __future__ import annotations

import io
import re
from urllib.parse import SplitResult, urlencode

from mlcbuild_format import strict_json

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.auth import RefreshToken
from mlcbuild.remotes.client import Client, Response
from mlcbuild.remotes.transport import quoted

_CLIENT = "mlcbuild"
"""Name under which this program requests tokens; OAuth 2 requires one."""


def ask(
    client: Client, realm: SplitResult, service: str, scope: str, login: str | RefreshToken | None
) -> Response:
    """Requests a token and returns the response, whatever its status. client: HTTP client of the token
    service; realm: URL for such requests; service: name of the registry there, "" if it states none; scope:
    the rights to request, separated by spaces; login: value of the Authorization header or refresh token;
    None requests a token without credentials. Raises RemoteError if no response arrives."""
    pairs = [("service", service)] if service else []
    target = f"{realm.path}?{realm.query}" if realm.query else realm.path
    if isinstance(login, RefreshToken):
        grant = {"grant_type": "refresh_token", "refresh_token": login.value, "client_id": _CLIENT}
        form = urlencode([*pairs, ("scope", scope), *grant.items()]).encode()
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(form))}
        return client.ask("POST", target, headers, io.BytesIO(form))
    query = urlencode([*pairs, *(("scope", item) for item in scope.split(" "))])
    target += f"{'&' if realm.query else '?'}{query}"
    return client.ask("GET", target, {"Authorization": login} if login else {})


def token(data: bytes, host: str) -> str:
    """Returns the token in `data`, the body of the response of the token service `host`. Raises RemoteError
    if it holds none, or one that no header can hold."""
    try:
        document = strict_json.parse(data)
        issued = document.get("token") or document["access_token"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise RemoteError(f"its token service {quoted(host)} returned no token") from None
    if not isinstance(issued, str) or not re.fullmatch(r"[\x21-\x7e]+", issued):
        raise RemoteError(f"its token service {quoted(host)} returned an invalid token")
    return issued
