"""Looks up the credentials of a host in the environment or netrc, for registries also in Podman's and
Docker's files. They never appear in a message."""

from __future__ import annotations

import base64
import netrc
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlcbuild_format import strict_json

from mlcbuild.errors import RemoteError

_NO_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Matches control characters, and bytes of an environment variable that are not UTF-8."""
_HUB = ("https://index.docker.io/v1/", "docker.io", "index.docker.io", "registry-1.docker.io")
"""Names of Docker Hub: the first in Docker's file, the second in Podman's."""
_TOKEN_USER = "<token>"
"""Name of the user, in the answer of a credential helper, that marks the secret as a refresh token."""


@dataclass(frozen=True)
class RefreshToken:
    """A secret for which a registry's token service issues tokens, as OAuth 2 defines it. `docker login`
    stores it as `identitytoken` where the service issues one, as Azure's does."""

    value: str = field(repr=False)


def home() -> Path:
    """Returns the user's home directory; "~", a path that hardly exists, if the system does not know it."""
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises RuntimeError then


def variables(host: str) -> tuple[str, str]:
    """Returns the names of the environment variables for a host's bearer token and its `user:password`,
    MLCBUILD_TOKEN_<HOST> and MLCBUILD_LOGIN_<HOST>. <HOST> is the host's name in capitals, with "_" for all
    but letters and digits: EXAMPLE_ORG for example.org. host: without a port.

    The host is part of the name, so that a recipe cannot make mlcbuild send a credential to another host.
    """
    name = re.sub(r"[^A-Z0-9]", "_", host.upper())
    return f"MLCBUILD_TOKEN_{name}", f"MLCBUILD_LOGIN_{name}"


def authorization(host: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the value of the Authorization header for a host, or None without credentials.

    The environment variable MLCBUILD_TOKEN_<HOST> comes first ("Bearer <token>"), then MLCBUILD_LOGIN_<HOST>
    ("Basic <base64>", see `variables`), then netrc's entry ("Basic"). host: without a port. Raises
    RemoteError for malformed credentials and for a netrc that cannot be read or parsed.
    """
    token, login = variables(host)
    if value := environ.get(token):
        if not re.fullmatch(r"[\x21-\x7e]+", value):
            raise RemoteError(
                f"the token in ${token} holds a space or a character outside ASCII: set it again"
            )
        return f"Bearer {value}"
    if value := environ.get(login):
        if ":" not in value or _NO_TEXT.search(value):
            raise RemoteError(f"${login} must be user:password, in UTF-8 and without control characters")
        return basic(value)
    return _from_netrc(host, environ)


def basic(login: str) -> str:
    """Returns the value of an Authorization header for a login, "user:password", with HTTP basic
    authentication.
    """
    return "Basic " + base64.b64encode(login.encode()).decode()


def _from_netrc(host: str, environ: Mapping[str, str]) -> str | None:
    path = Path(environ.get("NETRC") or home() / ".netrc")
    if not path.is_file():
        return None
    try:
        entry = netrc.netrc(path).authenticators(host)
    except netrc.NetrcParseError as error:  # the parser's message may quote a password
        raise RemoteError(f"{path}:{error.lineno}: the file cannot be parsed") from None
    except (OSError, UnicodeDecodeError):
        raise RemoteError(f"{path}: the file cannot be read") from None
    return basic(f"{entry[0]}:{entry[2]}") if entry is not None else None


def challenges(header: str) -> dict[str, dict[str, str]]:
    """Parses a WWW-Authenticate header, also several of them joined by commas. Returns scheme, such as
    "bearer" -> its parameters (name -> value), all but the values in lower case; of two challenges with one
    scheme the first counts."""
    offered: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    for name, mark, quoted, plain in re.findall(r'([\w-]+)(?:\s*(=)\s*(?:"([^"]*)"|([^\s,"]*)))?', header):
        if mark:
            fields.setdefault(name.lower(), quoted or plain)
        else:
            fields = {}
            offered.setdefault(name.lower(), fields)
    return offered


def refusal(host: str, status: int, *, authorized: bool) -> str:
    """Returns what HTTP status 401 or 403 of a host means for the user, as the end of a sentence.
    authorized: True if credentials were sent.
    """
    if authorized:
        return f"it refuses the credentials for {host} (status {status})"
    token, login = variables(host.partition(":")[0])
    return (
        f"it requires credentials (status {status}): set ${token} to a token, or ${login} to "
        "user:password, or write them into netrc"
    )


def login(host: str, environ: Mapping[str, str] = os.environ) -> str | RefreshToken | None:
    """Returns the value of the Authorization header for a registry: from the environment or netrc (see
    `authorization`), else from Podman's, else from Docker's file, which may have a refresh token instead.

    Credential helpers that these files name are run. `host` may include a port. Returns None without
    credentials. A helper that is not installed or ends with an error has none. Raises RemoteError for
    malformed credentials, for a file that cannot be read or parsed, and if a helper does not follow Docker's
    protocol or runs for more than 30 seconds.
    """
    header = authorization(host.rpartition(":")[0] if ":" in host else host, environ)
    if header is not None:
        return header
    docker = Path(environ.get("DOCKER_CONFIG") or home() / ".docker") / "config.json"
    podman = (
        environ.get("REGISTRY_AUTH_FILE")
        or f"{environ.get('XDG_RUNTIME_DIR', '/nowhere')}/containers/auth.json"
    )
    for path in (Path(podman), docker):
        if path.is_file() and (stored := _from_docker(path, host)) is not None:
            return stored
    return None


def _from_docker(path: Path, host: str) -> str | RefreshToken | None:
    names = (*_HUB, host) if host in _HUB else (host, f"https://{host}")
    try:
        document = strict_json.parse(path.read_bytes())
        helpers, logins = document.get("credHelpers", {}), document.get("auths", {})
        name = next((name for name in names if name in helpers or name in logins), names[0])
        helper = helpers.get(name) or document.get("credsStore")
        entry = logins.get(name, {})
        stored = base64.b64decode(entry.get("auth", "")).decode()
        refresh = str(entry.get("identitytoken") or "")
    except (OSError, ValueError, AttributeError, TypeError):  # the parser's message may quote a secret
        raise RemoteError(f"{path}: the file cannot be parsed") from None
    if refresh:  # The user in `auth` is a placeholder then.
        return RefreshToken(refresh)
    if stored:
        return basic(stored)
    return _from_helper(str(helper), name) if helper else None


def _from_helper(helper: str, host: str) -> str | RefreshToken | None:
    """Runs a helper program of Docker's credential protocol, and returns the value of the Authorization
    header, or a refresh token. helper: the end of the program's name, docker-credential-<helper>; host: the
    registry's name in Docker's file. Returns None if the program is not installed, ends with an error, or has
    no credentials for the host. Raises RemoteError if it does not follow the protocol or runs for more than
    30 seconds."""
    program = (
        shutil.which(f"docker-credential-{helper}") if re.fullmatch(r"[A-Za-z0-9_.-]+", helper) else None
    )
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "get"], input=host.encode(), capture_output=True, timeout=30, check=False
        )
        document = strict_json.parse(done.stdout) if done.returncode == 0 else {}
        user, secret = document.get("Username"), document.get("Secret")
    except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired):
        raise RemoteError(
            f"docker-credential-{helper} does not follow Docker's credential protocol"
        ) from None
    if not user or not secret:
        return None
    return RefreshToken(str(secret)) if user == _TOKEN_USER else basic(f"{user}:{secret}")
