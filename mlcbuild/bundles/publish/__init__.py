"""Bundles in registries and on model hubs: sent there once they are verified, and fetched again.

    oci://host/repository:tag        an artifact of an OCI registry    (publish/artifact.py)
    hf://organisation/name@branch    a model repository of a hub       (publish/repository.py)

What was sent is named by its content: a digest, a commit. What is fetched is checked file by file against
its bundle.json before it has its name.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from mlcbuild.remotes.kinds import KINDS, destination


def pinned(url: str) -> bool:
    """Whether an address can never mean anything else."""
    place = destination(url)
    return place is not None and place.pinned(url)


def fault(url: str, *, writing: bool) -> str:
    """What is wrong with an address to publish to, or to pull from; "" if nothing."""
    if re.search(r"[\x00-\x20\x7f#]", url):
        return f"'{url}' must be an address alone, without '#' and spaces"
    try:
        urlsplit(url).port  # noqa: B018 - raises ValueError for one that is none
    except ValueError:
        return "the URL cannot be understood"
    place = destination(url)
    if place is not None:
        return place.fault(url, writing)
    forms = [f"{kind.form} ({kind.publishes.name})" for kind in KINDS.values() if kind.publishes is not None]
    return f"'{url}' must start with {' or '.join(forms)}"
