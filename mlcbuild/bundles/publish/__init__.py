"""Publishes verified bundles to registries and model hubs, and downloads them.

    oci://host/repository:tag        an artifact of an OCI registry    (publish/artifact.py)
    hf://organisation/name@branch    a model repository of a hub       (publish/repository.py)

A published bundle is named by its contents: a digest or a commit. Every file of a downloaded bundle is
checked against its bundle.json before the directory gets its final name.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from mlcbuild.remotes.kinds import KINDS, destination


def pinned(url: str) -> bool:
    """Returns True if the address of a published bundle contains a digest or a commit, and so always names
    the same bundle; False for any other text.
    """
    place = destination(url)
    return place is not None and place.pinned(url)


def fault(url: str, *, writing: bool) -> str:
    """Returns the reason why an address cannot be used for bundles, or "" if it can. writing: True for
    publishing, False for downloading.
    """
    if re.search(r"[\x00-\x20\x7f#]", url):
        return f"'{url}' must be an address alone, without '#' and spaces"
    try:
        urlsplit(url).port  # noqa: B018 - raises ValueError for one that is none
    except ValueError:
        return "the URL cannot be parsed"
    place = destination(url)
    if place is not None:
        return place.fault(url, writing)
    forms = [f"{kind.form} ({kind.publishes.name})" for kind in KINDS.values() if kind.publishes is not None]
    return f"'{url}' must start with {' or '.join(forms)}"
