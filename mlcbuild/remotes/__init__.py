"""Shared caches: other stores of the same records and blobs: a directory, a web server, a bucket, a registry.

A remote holds `ac/<key>` and `cas/<digest>` and needs no program of ours on its side. It is never believed:
a record must follow from its own pre-image (and carry a trusted signature where that is asked for), a blob
must have its digest, both before anything sees them. So the worst that a remote can do is to be no help.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mlcbuild.remotes.kinds import fault as fault

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
