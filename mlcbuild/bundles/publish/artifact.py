"""Publishes and downloads a bundle as an artifact of an OCI registry, one layer for each file, so that `oras
pull` also gives the bundle.

    artifactType  application/vnd.mlcbuild.bundle.v1
    config        bundle.json
    layers        one for each file; annotations: its path (org.opencontainers.image.title), its BLAKE3

Nothing in it depends on time: one bundle is one digest. A file that the registry has is not sent again: its
BLAKE3 is in the tag's manifest or in another bundle of the run, and the file is mounted if it is in another
repository. Format: https://github.com/opencontainers/image-spec/blob/v1.1.0/manifest.md
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from mlcbuild_format.bundle import MANIFEST, Manifest

from mlcbuild.bundles.publish.names import check_names
from mlcbuild.canon import file_digest
from mlcbuild.errors import RemoteError
from mlcbuild.remotes.background import Background
from mlcbuild.remotes.oci_reference import Descriptor, RegistryAddress, layers_of, parse
from mlcbuild.remotes.registry import MANIFEST as MEDIA_TYPE
from mlcbuild.remotes.registry import Registry
from mlcbuild.remotes.transport import Attempts

TYPE = "application/vnd.mlcbuild.bundle.v1"
CONFIG_TYPE = "application/vnd.mlcbuild.bundle.config.v1+json"
TITLE = "org.opencontainers.image.title"
BLAKE3 = "dev.mlcbuild.blake3"
_AT_ONCE = 4
"""Number of a bundle's files that are transferred at the same time."""

Uploaded = dict[tuple[str, str], tuple[str, str]]
"""Files that registries are known to have: (registry, BLAKE3 of a file) -> (digest "sha256:<hex>" of the
file, a repository of the registry that has it)."""


def push(
    bundle: Path, manifest: Manifest, files: Mapping[str, int], to: str, uploaded: Uploaded
) -> tuple[str, int]:
    """Publishes a bundle as an OCI artifact, and returns (immutable address of the artifact, number of bytes
    of files sent, 0 if the registry has all of them). The tag is set last, after all files. bundle: its
    directory; files: path -> size in bytes; to: the registry's address; uploaded: files that registries are
    known to have, which is updated. Raises RemoteError if the registry refuses or cannot be reached.
    """
    place = parse(to)
    with Background(_AT_ONCE) as pool, Registry(place) as target:
        before = target.manifest(place.reference)
        present_layers = _present_layers(before[1]) if before is not None else {}
        digests = {name: file.blake3 for name, file in manifest.files.items()}
        digests |= {name: file_digest(bundle / name) for name in files if name not in digests}
        for layer in present_layers.values():
            if BLAKE3 in layer.annotations:
                uploaded.setdefault((place.host, layer.annotations[BLAKE3]), (layer.digest, place.repository))
        send = partial(_send, target, bundle, digests, uploaded)
        # Each content is sent once, since two files may be equal.
        first = {digests[name]: name for name in reversed(list(files))}
        sent = dict(zip(first, pool.all(partial(send, name) for name in first.values()), strict=True))
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
    target: Registry, bundle: Path, digests: Mapping[str, str], uploaded: Uploaded, name: str
) -> tuple[str, int]:
    """Mounts or uploads a file of a bundle to a registry's repository, unless it has the file. digests: path
    -> BLAKE3; name: path of the file; uploaded: files that registries are known to have, to which it is
    added. Returns (digest "sha256:<hex>" of the file, number of bytes sent, 0 if it was there or mounted).
    Raises RemoteError if the registry refuses or cannot be reached."""
    place, key = target.place, (target.place.host, digests[name])
    if key in uploaded:
        digest, repository = uploaded[key]
        if target.has(digest) or (repository != place.repository and target.mount(digest, repository)):
            return digest, 0
    path = bundle / name
    with path.open("rb") as file:
        digest = target.send(file, path.stat().st_size)
    uploaded[key] = (digest, place.repository)
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


def _address(place: RegistryAddress, digest: str) -> str:
    return str(RegistryAddress(place.host, place.repository, digest, place.plain))


def fetch(source: str, directory: Path) -> tuple[str, frozenset[str]]:
    """Downloads the files of the artifact at the address `source` into an existing directory, where files of
    an interrupted transfer are continued, and checks their SHA-256. Returns (immutable address, paths of the
    files). Raises RemoteError if the registry refuses, cannot be reached or has no bundle there, if a file's
    name is unsafe or its content damaged, or, before any download, if the disk lacks room; OSError if a file
    cannot be written."""
    place = parse(source)
    with Background(_AT_ONCE) as pool, Registry(place) as origin:
        manifest = origin.manifest(place.reference)
        if manifest is None:
            raise RemoteError("it has no artifact of this name; check the name and the tag")
        layers = _layers(manifest[1])
        if MANIFEST not in layers:
            raise RemoteError(f"it is not a bundle: it holds no {MANIFEST}")
        check_names(layers)
        size, free = sum(layer.size for layer in layers.values()), shutil.disk_usage(directory).free
        if size > free + sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()):
            raise RemoteError(f"its manifest states {size} bytes, and {directory.parent} has room for {free}")
        pool.all(partial(_fetch, origin, layer, directory / name) for name, layer in layers.items())
        return _address(place, manifest[0]), frozenset(layers)


def _layers(data: bytes) -> dict[str, Descriptor]:
    """Returns path of a file (a layer's title) -> layer (Descriptor), for the layers of an OCI manifest that
    have a title. data: the manifest's bytes. Raises RemoteError if they cannot be parsed, or name a file
    twice."""
    try:
        layers = [layer for layer in layers_of(data) if TITLE in layer.annotations]
    except ValueError:
        raise RemoteError("its manifest cannot be parsed") from None
    layers_by_title = {layer.annotations[TITLE]: layer for layer in layers}
    if len(layers_by_title) < len(layers):
        raise RemoteError("its manifest names a file twice")
    return layers_by_title


def _present_layers(data: bytes) -> dict[str, Descriptor]:
    """Returns path of a file -> layer, for the layers with a path (title) of the OCI manifest to which a
    registry's tag refers now. data: the manifest; {} if it cannot be parsed or names a file twice.
    """
    try:
        return _layers(data)
    except RemoteError:
        return {}


def _fetch(origin: Registry, layer: Descriptor, path: Path) -> None:
    """Downloads a layer of an OCI artifact to `path`, continuing an earlier transfer. A file whose SHA-256 is
    not the layer's is emptied and downloaded once more. Raises RemoteError if it then differs again (the file
    is left empty), if the SHA-256 is right but the size is not the stated one, if the registry lacks the
    layer, or if the transfer fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    for _ in range(2):
        _append(origin, layer, path)
        with path.open("rb") as file:
            actual = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        size = path.stat().st_size
        if actual == layer.digest:
            break
        path.write_bytes(b"")
    else:
        if size > layer.size:
            raise RemoteError(f"{path.name} has more than the {layer.size} bytes that its manifest states")
        raise RemoteError(f"{path.name} has other bytes than its digest states")
    if size != layer.size:
        raise RemoteError(f"{path.name} has {size} bytes where its manifest states {layer.size}")


def _append(origin: Registry, layer: Descriptor, path: Path) -> None:
    attempts = Attempts()
    while (have := path.stat().st_size) < layer.size:
        began = time.monotonic()
        try:
            body = origin.blob(layer.digest, have)
            if body is None:
                raise RemoteError(f"{path.name} is missing")
            with body, path.open("r+b") as file:
                file.seek(body.start)
                file.truncate()
                # One byte more than stated is enough to refuse the file.
                while (room := layer.size + 1 - file.tell()) > 0 and (data := body.read()):
                    file.write(data[:room])
        except RemoteError as error:
            attempts.failed(error, path.stat().st_size - have, began)
        else:
            if path.stat().st_size < layer.size:
                return  # If the file is too short, the digest check reports it.
