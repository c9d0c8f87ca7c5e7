"""Publishes and downloads a bundle as a model repository of a Hugging Face hub: its files, and a model card
derived from its manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

from mlcbuild_format import strict_json
from mlcbuild_format.bundle import MANIFEST, Manifest

from mlcbuild.bundles.provenance import STATEMENT
from mlcbuild.bundles.publish.card import card
from mlcbuild.bundles.publish.names import check_names
from mlcbuild.checkpoints import hub
from mlcbuild.checkpoints.hub import HubFile, HubSource
from mlcbuild.checkpoints.hub_failures import AbsentError
from mlcbuild.errors import RemoteError
from mlcbuild.remotes.background import Background

CARD = "README.md"
_OWN = (CARD, ".gitattributes")
"""Names of files that a hub's repository of a published bundle has in addition to the files of the bundle."""
_AT_ONCE = 4


def push(
    bundle: Path, manifest: Manifest, files: Mapping[str, int], to: str, uploaded: object
) -> tuple[str, int]:
    """Publishes a bundle with a model card, README.md, and returns (address of the repository at the new
    commit, number of bytes of the bundle sent); if the repository has all of this already, there is no new
    commit, and the current one and 0 are returned. files: path -> size in bytes; to: the address; uploaded:
    not used.

    A repository that does not exist is created as private. All other files in it are deleted, except for
    .gitattributes. Raises SourceError if the hub refuses or cannot be reached.
    """
    source = cast(HubSource, hub.parse_source(to))
    text = card(manifest, list(_sources(bundle)), to).encode()
    remote_files = _there(source)
    same = {
        name
        for name in files
        if (hub_file := remote_files.get(name)) and _is_same(bundle / name, files[name], hub_file)
    }
    card_there = CARD in remote_files and remote_files[CARD].git_oid == _git_oid(text)
    stale = remote_files.keys() - files.keys() - set(_OWN)
    lacking = {name: bundle / name for name in files if name not in same}
    if not lacking and not stale and card_there:
        return str(HubSource(source.repo, hub.current_commit(source))), 0
    sources: dict[str, Path | bytes] = {**lacking, CARD: text}
    commit = hub.commit(source, sources, stale, f"{manifest.name}, built by mlcbuild")
    return str(HubSource(source.repo, commit)), sum(files[name] for name in lacking)


def _there(source: HubSource) -> dict[str, HubFile]:
    """Returns path -> size and digests (HubFile) of each file in a branch of the hub's repository; {} if the
    repository or branch does not exist yet. Raises SourceError if the hub refuses or cannot be reached."""
    with suppress(AbsentError):
        return hub.list_files(source)[1]
    return {}


def _is_same(path: Path, size: int, hub_file: HubFile) -> bool:
    if hub_file.size != size:
        return False
    if hub_file.sha256 is not None:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == hub_file.sha256
    return _git_oid(path.read_bytes()) == hub_file.git_oid


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sources(bundle: Path) -> Iterator[str]:
    """Yields the addresses hf://organisation/name@commit of the hub repositories from which a bundle was
    built, each once, as its provenance names them; none if it has no provenance that can be read."""
    try:
        document = strict_json.parse((bundle / STATEMENT).read_bytes())
        items = document["predicate"]["buildDefinition"]["resolvedDependencies"]
        uris = [str(item.get("uri", "")) for item in items]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    repositories = (re.match(r"hf://[^@]+@[^/]+", uri) for uri in uris)
    yield from dict.fromkeys(match[0] for match in repositories if match)


def fetch(source: str, directory: Path) -> tuple[str, frozenset[str]]:
    """Downloads a repository's bundle into a directory, and returns (address at a commit, paths of the
    files). The files are read-only; their contents are not compared with bundle.json. The hub's cache keeps
    downloaded files, to which they are hard links where possible, and resumes interrupted transfers. Raises
    SourceError if the hub refuses or cannot be reached, RemoteError for a repository that is no bundle,
    OSError if a file cannot be written."""
    asked = cast(HubSource, hub.parse_source(source))
    commit, listed = hub.list_files(asked)
    exact = HubSource(asked.repo, commit)
    names = [name for name in listed if name not in _OWN]
    if MANIFEST not in names:
        raise RemoteError(f"it is not a bundle: it holds no {MANIFEST}")
    check_names(names)
    hub.reach(exact, names)
    with Background(_AT_ONCE) as pool:
        pool.all(partial(_fetch, exact, directory, name) for name in names)
    return str(exact), frozenset(names)


def _fetch(source: HubSource, directory: Path, name: str) -> None:
    place = directory / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    _link_or_copy(hub.download(source, name), place)
    place.chmod(0o444)


def _link_or_copy(cached: Path, place: Path) -> None:
    """Makes `place`, where no file may be, a hard link of a file in the hub's cache, so that a bundle is not
    on the disk twice, or a copy where that is impossible or the file is another user's: that user could
    change a linked file, which may be a library, after it was checked."""
    with suppress(OSError):
        if cached.stat().st_uid == os.geteuid():
            place.hardlink_to(cached)
            return
    shutil.copyfile(cached, place)
