"""Reads endpoints and credentials of S3 buckets from where other S3 tools look: environment variables
(AWS_*), then the files in ~/.aws."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import auth

OPTIONS = ("endpoint", "region")
_ELSEWHERE = (  # Options with which obstore fetches credentials itself
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_METADATA_ENDPOINT",
)
_CONFIG = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
"""Option in ~/.aws/config and ~/.aws/credentials -> name of the same option in obstore."""


def fault(url: str) -> str:
    """Returns the reason why an s3:// URL is invalid, or "" if it is valid."""
    parts = urlsplit(url)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc):
        return f"'{url}' names no bucket: s3://bucket/prefix"
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := next((name for name in options if name not in OPTIONS), ""):
        return f"'{url}': the option '{unknown}' is unknown: there are {' and '.join(OPTIONS)}"
    endpoint = urlsplit(options.get("endpoint", "https://x"))
    if endpoint.scheme not in ("https", "http") or not endpoint.hostname or "@" in endpoint.netloc:
        return f"'{url}': the endpoint must be https://host or http://host, without credentials"
    return ""


def settings(url: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the options with which obstore opens a bucket, except bucket and prefix: name in obstore, such
    as "access_key_id" -> value. Those in the URL precede those of the environment, and these the ones in the
    AWS files; the region is "us-east-1" if none of them states one. If AWS_SKIP_SIGNATURE is 1 or true,
    skip_signature takes the place of credentials.

    Otherwise raises RemoteError if there are no credentials, unless a variable is set with which obstore
    fetches some itself, such as AWS_WEB_IDENTITY_TOKEN_FILE. Raises it, too, for an AWS file that cannot be
    parsed, and for one that a variable names and that is there but cannot be opened; any other that cannot be
    opened counts as missing.
    """
    options: dict[str, Any] = _files(environ)
    for name, variables in {
        "access_key_id": ("AWS_ACCESS_KEY_ID",),
        "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
        "session_token": ("AWS_SESSION_TOKEN",),
        "region": ("AWS_DEFAULT_REGION", "AWS_REGION"),
        "endpoint": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    }.items():
        for variable in variables:
            if environ.get(variable):
                options[name] = environ[variable]
    if environ.get("AWS_ACCESS_KEY_ID") and not environ.get("AWS_SESSION_TOKEN"):
        options.pop("session_token", None)  # The token belongs to other credentials.
    options |= parse_qsl(urlsplit(url).query)
    options.setdefault("region", "us-east-1")
    if environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return {key: options[key] for key in OPTIONS if key in options} | {"skip_signature": True}
    if {"access_key_id", "secret_access_key"} <= options.keys() or any(map(environ.get, _ELSEWHERE)):
        return options
    raise RemoteError(
        "there are no credentials for it: set $AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY, or write them "
        "into ~/.aws/credentials (and name the section in $AWS_PROFILE); a public bucket needs "
        "AWS_SKIP_SIGNATURE=true"
    )


def _files(environ: Mapping[str, str]) -> dict[str, Any]:
    profile = environ.get("AWS_PROFILE") or "default"
    home = auth.home() / ".aws"
    stated = [environ.get(name, "") for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")]
    sections = {
        Path(stated[0] or home / "config"): ("default", f"profile {profile}"),
        Path(stated[1] or home / "credentials"): (profile,),
    }
    options: dict[str, Any] = {}
    for path, names in sections.items():
        parser = ConfigParser(interpolation=None, default_section="\0")
        try:
            with path.open(encoding="utf-8") as file:
                parser.read_file(file)
        except (ConfigError, UnicodeDecodeError):  # the parser's message may quote a secret
            raise RemoteError(f"{path}: the file cannot be parsed") from None
        except OSError as error:
            if str(path) in stated and not isinstance(error, FileNotFoundError):
                raise RemoteError(f"{path}: the file cannot be read: {error.strerror}") from None
            continue
        section = names[-1] if parser.has_section(names[-1]) else names[0] if profile == "default" else ""
        if parser.has_section(section):
            options |= {_CONFIG[key]: value for key, value in parser.items(section) if key in _CONFIG}
    return options
