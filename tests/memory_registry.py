"""A stand-in for OCI registries that keeps blobs and tags in memory. Its clients have the methods of the
class Registry."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from functools import partial
from typing import Any

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.oci_reference import RegistryAddress
from mlcbuild.remotes.registry import UploadSource
from mlcbuild.remotes.transport import Body

Answer = bytes | BaseException | list[bytes | BaseException]
"""An answer of a simulated registry to a request for a blob: its whole content, an exception that the request
raises, or a list. A list is a body that starts at byte 0, whatever offset was requested; each read returns
its next bytes or raises its next exception."""


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _next(parts: list[bytes | BaseException]) -> bytes:
    """Removes and returns the next part of a simulated response body; b"" at its end. If the part is an
    exception, raises it, as a failing connection would."""
    part = parts.pop(0) if parts else b""
    if isinstance(part, BaseException):
        raise part
    return part


class MemoryRegistries:
    """Simulated OCI registries in memory: their blobs, tags and manifests, the requests that they received,
    and the bytes or exceptions with which they answer instead of a blob."""

    def __init__(self) -> None:
        self.blobs: defaultdict[tuple[str, str], dict[str, bytes]] = defaultdict(dict)
        """(host, repository) of a simulated registry -> blobs of this repository: digest -> bytes."""
        self.tags: defaultdict[tuple[str, str], dict[str, bytes]] = defaultdict(dict)
        """(host, repository) -> tag or digest -> manifest."""
        self.answers: dict[str, list[Answer]] = {}
        """Digest of a blob -> what is returned instead of the blob's bytes, one entry for each request."""
        self.truncated: set[bytes] = set()
        """Manifests that the registries accept and then cannot return."""
        self.calls: list[str] = []
        self.open_clients = 0

    def registry(self, place: RegistryAddress, timeout: float = 0.0) -> MemoryRegistry:
        """Returns a client of the simulated registry for one repository. place: its host and repository;
        `timeout` exists for compatibility with the real client and has no effect."""
        return MemoryRegistry(self, place)


class MemoryRegistry:
    def __init__(self, registries: MemoryRegistries, place: RegistryAddress) -> None:
        self.place, self._all, self._key = place, registries, (place.host, place.repository)
        registries.open_clients += 1

    def manifest(self, reference: str) -> tuple[str, bytes] | None:
        data = self._all.tags[self._key].get(reference)
        if data in self._all.truncated:
            raise RemoteError("it returns a truncated manifest")
        return None if data is None else (digest_of(data), data)

    def blob(self, digest: str, start: int = 0) -> Body | None:
        self._all.calls.append(f"blob {start}")
        data = self._all.blobs[self._key].get(digest)
        if self._all.answers.get(digest):
            answer = self._all.answers[digest].pop(0)
            if isinstance(answer, BaseException):
                raise answer
            if isinstance(answer, list):
                return Body(0, partial(_next, answer), lambda: None)
            data = answer
        if data is None:
            return None
        parts: list[bytes | BaseException] = [data[start : start + 5], data[start + 5 :]]
        return Body(start, partial(_next, parts), lambda: None)

    def has(self, digest: str) -> bool:
        return digest in self._all.blobs[self._key]

    def mount(self, digest: str, repository: str) -> bool:
        data = self._all.blobs[self.place.host, repository].get(digest)
        if data is None:
            return False
        self._all.calls.append("mount")
        self._all.blobs[self._key][digest] = data
        return True

    def send(self, source: UploadSource, size: int) -> str:
        data = source.read(size)
        self._all.calls.append(f"send {size}")
        self._all.blobs[self._key][digest_of(data)] = data
        return digest_of(data)

    def send_bytes(self, data: bytes) -> str:
        self._all.calls.append(f"send {len(data)}")
        self._all.blobs[self._key][digest_of(data)] = data
        return digest_of(data)

    def tag(self, reference: str, manifest: bytes) -> str:
        self._all.calls.append("tag")
        self._all.tags[self._key][reference] = self._all.tags[self._key][digest_of(manifest)] = manifest
        return digest_of(manifest)

    def __enter__(self) -> MemoryRegistry:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        self._all.open_clients -= 1
