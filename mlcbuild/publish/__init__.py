"""Bundles in registries and on model hubs: sent there once they are verified, and fetched again.

    oci://host/repository:tag        an artifact of an OCI registry    (publish/artifact.py)
    hf://organisation/name@branch    a model repository of a hub       (publish/repository.py)

What was sent is named by its content: a digest, a commit. What is fetched is checked file by file against
its bundle.json before it has its name.
"""

from __future__ import annotations

import re

from mlcbuild.errors import UsageError
from mlcbuild.hub import is_commit, parse_source
from mlcbuild.remotes import reference


def scheme(url: str) -> str:
    return url.partition("://")[0]


def pinned(url: str) -> bool:
    """Whether an address can never mean anything else."""
    if scheme(url) == "oci":
        return reference.parse(url).reference.startswith("sha256:")
    return is_commit(url.rpartition("@")[2])


def fault(url: str, *, writing: bool) -> str:
    """What is wrong with an address to publish to, or to pull from; "" if nothing."""
    if re.search(r"[\x00-\x20\x7f#]", url):
        return f"'{url}' must be an address alone, without '#' and spaces"
    if url.startswith("oci://"):
        return reference.fault(url) or _tag_fault(url, writing=writing)
    if url.startswith("hf://"):
        try:
            source = parse_source(url)
        except UsageError as error:
            return str(error).removeprefix("source ")
        if source is not None and source.is_pinned and writing:
            return f"'{url}' names a commit: publish to a branch"
        return ""
    return f"'{url}' must start with oci:// (a registry) or hf:// (a model hub)"


def _tag_fault(url: str, *, writing: bool) -> str:
    found = reference.parse(url).reference
    if not found:
        return f"'{url}' lacks a tag: add ':' and one"
    if found.startswith("sha256:") and writing:
        return f"'{url}' names content by its digest: publish to a tag"
    return ""
