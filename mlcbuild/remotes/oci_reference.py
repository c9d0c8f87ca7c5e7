"""Parses addresses of OCI registries, `oci://host/repository:tag`, and the blob descriptors of manifests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from mlcbuild_format import strict_json

_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class RegistryAddress:
    """The address of a repository in a registry, with an optional tag or digest."""

    host: str
    """Host name of the registry, with a port if it is not the usual one: "host" or "host:port"."""
    repository: str
    reference: str = ""
    """A tag, or a digest as sha256:<64 hex>; "" if the address has neither."""
    plain: bool = False
    """True if the registry is reached by HTTP without encryption."""

    @property
    def address(self) -> str:
        """Returns the URL of the registry's server. That of docker.io has another name, as every client of
        Docker Hub knows."""
        host = "registry-1.docker.io" if self.host == "docker.io" else self.host
        return f"{'http' if self.plain else 'https'}://{host}"

    def __str__(self) -> str:
        mark = "@" if self.reference.startswith("sha256:") else ":" if self.reference else ""
        return f"oci://{self.host}/{self.repository}{mark}{self.reference}"


@dataclass(frozen=True)
class Descriptor:
    """The description of a blob in an OCI manifest: digest, size and media type."""

    media: str
    digest: str
    """Digest of the blob's content, written sha256:<64 hex>."""
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, item: object) -> Descriptor:
        """Parses the JSON value of a blob descriptor in an OCI manifest. Raises ValueError if it describes no
        valid blob.
        """
        if not isinstance(item, dict):
            raise ValueError("a descriptor must be an object")
        media, digest, size = item.get("mediaType", ""), item.get("digest"), item.get("size")
        notes = item.get("annotations") or {}
        if not isinstance(media, str) or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError("a descriptor names a blob by sha256: and 64 hex digits")
        if type(size) is not int or not 0 <= size < 1 << 62:
            raise ValueError("a descriptor states a size")
        if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
            raise ValueError("annotations are text")
        return cls(media, digest, size, notes)

    def to_json(self) -> dict[str, object]:
        document: dict[str, object] = {"mediaType": self.media, "digest": self.digest, "size": self.size}
        return document | ({"annotations": dict(self.annotations)} if self.annotations else {})


def layers_of(manifest: bytes) -> list[Descriptor]:
    """Parses an OCI manifest, the bytes of a JSON document, and returns the descriptors of its layers, in its
    order; the list may be empty. Raises ValueError for anything but a manifest with valid layers."""
    try:
        document = strict_json.parse(manifest)
        return [Descriptor.from_json(item) for item in document["layers"]]
    except (LookupError, TypeError) as error:
        raise ValueError(f"not a manifest with layers: {type(error).__name__}") from None


def fault(url: str) -> str:
    """Returns the reason why an oci:// URL is invalid, or "" if it is valid."""
    parts = urlsplit(url)
    repository, _ = _split(parts.path)
    if not parts.hostname or not _NAME.fullmatch(repository):
        return (
            f"'{url}' names no repository: oci://host/name, in lower case letters, digits, '.', '_', '-', '/'"
        )
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name != "plain-http" or value not in ("true", "false"):
            return f"'{url}': after '?' there can be plain-http=true or plain-http=false, and nothing else"
    return "" if _reference_fault(url) == "" else f"'{url}': {_reference_fault(url)}"


def _reference_fault(url: str) -> str:
    _, reference = _split(urlsplit(url).path)
    if not reference or _TAG.fullmatch(reference) or _DIGEST.fullmatch(reference):
        return ""
    return f"'{reference}' is neither a tag (letters, digits, '.', '_', '-') nor sha256: and 64 hex digits"


def _split(path: str) -> tuple[str, str]:
    """Splits the path of an oci:// URL into (repository, tag or digest, which is "" if there is none)."""
    repository, at, digest = path.strip("/").partition("@")
    head, slash, tail = repository.rpartition("/")
    name, _, tag = tail.partition(":")
    return f"{head}{slash}{name}", digest if at else tag


def parse(url: str) -> RegistryAddress:
    """Parses a valid oci:// URL into the host, the repository, the tag or digest, and whether the connection
    is unencrypted: as its option plain-http states, and without that option only if the host is this machine:
    localhost, ::1 or 127.*."""
    parts = urlsplit(url)
    repository, reference = _split(parts.path)
    local = parts.hostname in ("localhost", "::1") or bool(re.match(r"127\.", parts.hostname or ""))
    options = dict(parse_qsl(parts.query))
    return RegistryAddress(
        parts.netloc, repository, reference, options.get("plain-http", "true" if local else "") == "true"
    )
