"""Credentials of a host, from the environment or netrc. They are never part of a message."""

from __future__ import annotations

import base64
import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path

from mlcbuild.errors import RemoteError


def variables(host: str) -> tuple[str, str]:
    """Names of the environment variables with a bearer token and with `user:password` for a host.

    The host is in the name, so that a recipe can not have a credential sent anywhere else.
    """
    name = re.sub(r"[^A-Z0-9]", "_", host.upper())
    return f"MLCBUILD_TOKEN_{name}", f"MLCBUILD_LOGIN_{name}"


def authorization(host: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The value of the Authorization header: bearer token, else login, else netrc's entry, else None.

    Raises RemoteError for credentials that cannot be sent, and for a netrc that cannot be read.
    """
    token, login = variables(host)
    if found := environ.get(token):
        if not re.fullmatch(r"[\x21-\x7e]+", found):
            raise RemoteError(f"the token in ${token} holds a space or what is not ASCII: set it anew")
        return f"Bearer {found}"
    if found := environ.get(login):
        if ":" not in found:
            raise RemoteError(f"${login} must be user:password")
        return _basic(found)
    return _from_netrc(host, environ)


def _basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


def _from_netrc(host: str, environ: Mapping[str, str]) -> str | None:
    path = Path(environ["NETRC"]) if environ.get("NETRC") else Path.home() / ".netrc"
    if not path.is_file():
        return None
    try:
        entry = netrc.netrc(path).authenticators(host)
    except netrc.NetrcParseError as error:  # its own message may quote a password
        raise RemoteError(f"{path}:{error.lineno}: the file cannot be understood") from None
    except (OSError, UnicodeDecodeError):
        raise RemoteError(f"{path}: the file cannot be read") from None
    return _basic(f"{entry[0]}:{entry[2]}") if entry is not None else None
