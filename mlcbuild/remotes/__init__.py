"""Remote caches: copies of step records and blobs in a directory, on a web server, in a bucket or in a
registry.

A remote cache holds `ac/<key>` and `cas/<digest>` and runs no program of mlcbuild. It is never trusted:
before any use, a record's key is recomputed from its pre-image (and a trusted signature is checked where one
is required), and a blob's digest is checked. A faulty remote can therefore cost time only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mlcbuild.remotes.kinds import fault as fault
from mlcbuild.remotes.kinds import normal as normal

Mode: TypeAlias = Literal["read", "write", "readwrite"]


@dataclass(frozen=True)
class Remote:
    """A remote cache as a recipe or the command line names it."""

    url: str
    """Address of the cache, below which its step records and blobs are: file:///directory, https://host/path
    or http://host/path, s3://bucket/prefix or oci://host/repository."""
    mode: Mode = "readwrite"
    ci_only: bool = False
    """True for a remote cache to which results are uploaded only if the environment variable CI is set, to
    anything but "", "0" and "false"."""
    trust: tuple[str, ...] = ()
    """Public keys, `ed25519:...`: each step record must be signed with the private key of one of them; ()
    requires no signature."""

    @property
    def reads(self) -> bool:
        return self.mode != "write"

    def writes(self, environ: Mapping[str, str] = os.environ) -> bool:
        in_ci = environ.get("CI", "").lower() not in ("", "0", "false")
        return self.mode != "read" and (in_ci or not self.ci_only)
