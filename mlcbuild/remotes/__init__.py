"""Shared caches: other stores of the same records and blobs: a directory, a web server, a bucket, a registry.

A remote holds `ac/<key>` and `cas/<digest>` and needs no program of ours on its side. It is never believed:
a record must follow from its own pre-image (and carry a trusted signature where that is asked for), a blob
must have its digest, both before anything sees them. So the worst that a remote can do is to be no help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import SplitResult, urlsplit

SCHEMES = ("https", "http", "s3", "oci", "file")
Mode: TypeAlias = Literal["read", "write", "readwrite"]


@dataclass(frozen=True)
class Remote:
    """A remote as a recipe or the command line names it."""

    url: str
    """file:///directory, https://host/path, s3://bucket/prefix or oci://host/repository."""
    mode: Mode = "readwrite"
    ci_only: bool = False
    """Written to only where the environment variable CI is set."""
    trust: tuple[str, ...] = ()
    """Public keys, `ed25519:...`: records must carry a signature by one of them; () takes every record."""

    @property
    def reads(self) -> bool:
        return self.mode != "write"

    def writes(self, environ: Mapping[str, str] = os.environ) -> bool:
        in_ci = environ.get("CI", "").lower() not in ("", "0", "false")
        return self.mode != "read" and (in_ci or not self.ci_only)


def fault(url: str) -> str:
    """What is wrong with the URL of a remote, as a sentence that never repeats a password; "" if nothing."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError for one that is none
    except ValueError:
        return "the URL cannot be understood"
    if parts.username is not None or parts.password is not None:
        return (
            "a URL with a user name or password is not taken: put them into netrc or the environment "
            "(MLCBUILD_TOKEN_<HOST>, MLCBUILD_LOGIN_<HOST>)"
        )
    if parts.scheme not in SCHEMES:
        return f"'{url}' must start with https://, http://, s3://, oci:// or file:///"
    if (
        parts.fragment
        or re.search(r"[\x00-\x20\x7f]", url)
        or (parts.query and parts.scheme not in ("s3", "oci"))
    ):
        return f"'{url}' must be an address alone, without '?', '#' and spaces"
    return _place_fault(url, parts)


def _place_fault(url: str, parts: SplitResult) -> str:
    if parts.scheme == "s3":
        from mlcbuild.remotes import aws

        return aws.fault(url)
    if parts.scheme == "oci":
        from mlcbuild.remotes import reference

        problem, tagged = reference.fault(url), bool(reference.parse(url).reference)
        return problem or (f"'{url}' has a tag or digest: a cache is a whole repository" if tagged else "")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        return f"'{url}' must name a directory of this machine: file:///path"
    return "" if parts.scheme == "file" or parts.hostname else f"'{url}' names no host"
