"""A bundle as an artifact of an OCI registry, one layer for each file, so that `oras pull` gives the bundle.

    artifactType  application/vnd.mlcbuild.bundle.v1
    config        bundle.json
    layers        one for each file; annotations: its path (org.opencontainers.image.title), its BLAKE3

Nothing in it depends on time: one bundle is one digest. A file that a registry has is not sent again: it is
known by its BLAKE3 from the tag's manifest or from another bundle of the run, and mounted where it is in
another repository. Format: https://github.com/opencontainers/image-spec/blob/v1.1.0/manifest.md
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

from mlcbuild_runtime.bundle import MANIFEST, Manifest

from mlcbuild.canon import file_digest
from mlcbuild.errors import RemoteError, SourceError
from mlcbuild.hub import check_name
from mlcbuild.remotes.reference import Descriptor, Place, parse
from mlcbuild.remotes.registry import MANIFEST as MEDIA_TYPE
from mlcbuild.remotes.registry import Registry

TYPE = "application/vnd.mlcbuild.bundle.v1"
CONFIG_TYPE = "application/vnd.mlcbuild.bundle.config.v1+json"
TITLE = "org.opencontainers.image.title"
BLAKE3 = "dev.mlcbuild.blake3"
_AT_ONCE = 4
"""Files on their way."""
_ATTEMPTS = 3

Seen = dict[tuple[str, str], tuple[str, str]]
"""(registry, BLAKE3) -> (SHA-256, a repository that has it)."""


def push(bundle: Path, manifest: Manifest, files: Mapping[str, int], to: str, seen: Seen) -> tuple[str, int]:
    """The artifact's address by digest, and the bytes that were sent. Raises RemoteError."""
    place = parse(to)
    with Registry(place) as target:
        before = target.manifest(place.reference)
        known = _layers(before[1]) if before is not None else {}
        digests = {name: file.blake3 for name, file in manifest.files.items()}
        digests |= {name: file_digest(bundle / name) for name in files if name not in digests}
        for layer in known.values():
            if BLAKE3 in layer.annotations:
                seen.setdefault((place.host, layer.annotations[BLAKE3]), (layer.digest, place.repository))
        send = partial(_send, target, bundle, digests, seen)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            # Each content once: two files may be alike.
            first = {digests[name]: name for name in reversed(list(files))}
            sent = dict(zip(first, pool.map(send, first.values()), strict=True))
        layers = [
            Descriptor(_media(name), sent[digests[name]][0], size, {TITLE: name, BLAKE3: digests[name]})
            for name, size in files.items()
        ]
        document = _document(manifest, layers)
        if before is not None and before[1] == document:
            return _address(place, before[0]), 0
        return _address(place, target.tag(place.reference, document)), sum(
            count for _, count in sent.values()
        )


def _send(
    target: Registry, bundle: Path, digests: Mapping[str, str], seen: Seen, name: str
) -> tuple[str, int]:
    """SHA-256 of a file that the repository now has, and how many bytes that took."""
    place, key = target.place, (target.place.host, digests[name])
    if key in seen:
        digest, repository = seen[key]
        if target.has(digest) or (repository != place.repository and target.mount(digest, repository)):
            return digest, 0
    path = bundle / name
    with path.open("rb") as file:
        digest = target.send(file, path.stat().st_size)
    seen[key] = (digest, place.repository)
    return digest, path.stat().st_size


def _document(manifest: Manifest, layers: list[Descriptor]) -> bytes:
    config = next(layer for layer in layers if layer.annotations[TITLE] == MANIFEST)
    facts = {
        TITLE: manifest.name,
        "dev.mlcbuild.model": manifest.model.name,
        "dev.mlcbuild.scheme": str(manifest.scheme["name"]),
        "dev.mlcbuild.target": str(manifest.target.get("name", manifest.machine.triple)),
    }
    document = {
        "schemaVersion": 2,
        "mediaType": MEDIA_TYPE,
        "artifactType": TYPE,
        "config": Descriptor(CONFIG_TYPE, config.digest, config.size).to_json(),
        "layers": [layer.to_json() for layer in layers],
        "annotations": facts,
    }
    return json.dumps(document, indent=2).encode()


def _media(name: str) -> str:
    return "application/json" if name.endswith(".json") else "application/octet-stream"


def _address(place: Place, digest: str) -> str:
    return str(Place(place.host, place.repository, digest, place.plain))


def fetch(source: str, directory: Path) -> tuple[str, frozenset[str]]:
    """Brings an artifact's files into a directory, each right by its SHA-256; its address by digest, and
    the paths. Raises RemoteError, OSError.
    """
    place = parse(source)
    with Registry(place) as origin:
        found = origin.manifest(place.reference)
        if found is None:
            raise RemoteError("there is nothing under this name")
        layers = _layers(found[1])
        if MANIFEST not in layers:
            raise RemoteError(f"it is no bundle: it holds no {MANIFEST}")
        try:
            for name in layers:
                check_name(name)
        except SourceError as error:
            raise RemoteError(str(error)) from None
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            jobs = [pool.submit(_fetch, origin, layer, directory / name) for name, layer in layers.items()]
            for job in jobs:
                job.result()
        return _address(place, found[0]), frozenset(layers)


def _layers(data: bytes) -> dict[str, Descriptor]:
    """The layers with a title, by it. Raises RemoteError for what is no manifest of files."""
    try:
        document = cast("dict[str, list[dict[str, object]]]", json.loads(data))
        found = {}
        for item in document["layers"]:
            notes = cast("dict[str, str]", item.get("annotations") or {})
            digest, size = str(item["digest"]), int(str(item["size"]))
            if TITLE in notes:
                found[notes[TITLE]] = Descriptor(str(item["mediaType"]), digest, size, notes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RemoteError("its manifest cannot be understood") from None
    return found


def _fetch(origin: Registry, layer: Descriptor, path: Path) -> None:
    """Goes on where an earlier transfer broke off; a whole that is wrong is fetched once more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    for _ in range(2):
        _append(origin, layer, path)
        with path.open("rb") as file:
            found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        if found == layer.digest:
            return
        path.write_bytes(b"")
    raise RemoteError(f"{path.name} has other bytes than its digest says")


def _append(origin: Registry, layer: Descriptor, path: Path) -> None:
    vain = 0
    while (have := path.stat().st_size) < layer.size:
        try:
            body = origin.blob(layer.digest, have)
            if body is None:
                raise RemoteError(f"{path.name} is missing")
            with body, path.open("r+b") as file:
                file.seek(body.start)
                file.truncate()
                while (data := body.read()) and file.tell() <= layer.size:
                    file.write(data)
        except RemoteError:
            vain = 0 if path.stat().st_size > have else vain + 1
            if vain == _ATTEMPTS:
                raise
        else:
            if path.stat().st_size < layer.size:
                return  # shorter than it should be: its digest will tell
