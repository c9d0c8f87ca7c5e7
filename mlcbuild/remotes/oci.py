"""A transport for a shared cache in an OCI registry: `oci://host/repository`.

    tag ac-<key>, cas-<digest>   a manifest with one layer: the record, the file

A registry names content by SHA-256 and deletes content that no manifest names, so each name is a tag.
"""

from __future__ import annotations

import json
import secrets
import threading
from typing import BinaryIO

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.oci_reference import Descriptor, layers_of, parse
from mlcbuild.remotes.registry import EMPTY, EMPTY_TYPE, MANIFEST, Registry
from mlcbuild.remotes.transport import TIMEOUT, Body, DamagedError

_PREFIX = "vnd.mlcbuild.cache"
TYPE = f"application/{_PREFIX}.v1"
_FILE = "application/octet-stream"


class Oci:
    """The transport for a remote cache in a repository of an OCI registry. Creating it raises RemoteError for
    credentials, a certificate file or a proxy in the environment that cannot be used."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        self._registry = Registry(parse(url), timeout)
        self._config = ""
        self._guard = threading.Lock()

    def open(self, name: str, start: int = 0) -> Body | None:
        layer = self._layer(name)
        if layer is None:
            return None
        if start >= layer.size:
            start = 0
        body = self._registry.blob(layer.digest, start)
        if body is None:
            raise DamagedError("the registry lacks the blob that the tag names")
        return body

    def size(self, name: str) -> int | None:
        layer = self._layer(name)
        if layer is not None and not self._registry.has(layer.digest):
            raise DamagedError("the registry lacks the blob that the tag names")
        return None if layer is None else layer.size

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        with self._guard:
            if not self._config:
                self._config = self._registry.send_bytes(EMPTY)
        digest = self._registry.send(source, size)
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": TYPE,
            "config": Descriptor(EMPTY_TYPE, self._config, len(EMPTY)).to_json(),
            "layers": [Descriptor(_FILE, digest, size).to_json()],
        }
        self._registry.tag(_tag(name), json.dumps(document).encode())
        if not self._shows(name):
            # A registry whose disk was full may keep a truncated manifest and accept the same bytes as
            # already stored. Only a manifest with other bytes replaces it.
            document["annotations"] = {f"{_PREFIX}.again": secrets.token_hex(8)}
            self._registry.tag(_tag(name), json.dumps(document).encode())
            if not self._shows(name):
                raise RemoteError("it does not return a manifest that it accepted")

    def close(self) -> None:
        self._registry.close()

    def _shows(self, name: str) -> bool:
        try:
            return self._registry.manifest(_tag(name)) is not None
        except RemoteError:
            return False

    def _layer(self, name: str) -> Descriptor | None:
        manifest = self._registry.manifest(_tag(name))
        if manifest is None:
            return None
        try:
            (layer,) = layers_of(manifest[1])
            return layer
        except ValueError:
            raise DamagedError("the tag does not name a file of a cache") from None


def _tag(name: str) -> str:
    return name.replace("/", "-")
