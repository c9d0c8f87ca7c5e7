"""Records as they travel, and who vouches for them.

A remote holds a record's two lines as they are, then one line for each signature:

    {"key":"ed25519:<public key>","signature":"<base64>"}

Signed is the key with all bytes of the record, under a tag of its own. An older record that somebody puts
back in the place of a newer one is still a true result of exactly this key: the key holds the digests of
all inputs, all code and all tool versions, so that there is nothing newer under the same key.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild.canon import canonical
from mlcbuild.errors import UsageError
from mlcbuild.records import Record

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LARGEST = 64 << 20
"""Bytes of a record: more is not one."""
_TAG = b"mlcbuild-record/1\0"
_PUBLIC = re.compile(r"ed25519:[A-Za-z0-9_-]{43}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class RefusedError(ValueError):
    """A record that must not be used. The message is the reason, the end of a sentence."""


@dataclass(frozen=True)
class Signer:
    """A private key."""

    public: str
    private: Ed25519PrivateKey = field(repr=False)

    def sign(self, key: str, body: bytes) -> bytes:
        """The line that vouches for a record."""
        found = base64.b64encode(self.private.sign(_TAG + key.encode() + b"\0" + body)).decode()
        return canonical({"key": self.public, "signature": found}) + b"\n"


def is_public(text: str) -> bool:
    """Whether a text has the form of a public key."""
    return bool(_PUBLIC.fullmatch(text)) and len(_decoded(text)) == 32


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """$MLCBUILD_KEY, or the user's configuration directory on this system."""
    if chosen := environ.get("MLCBUILD_KEY"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path("~/Library/Application Support/mlcbuild/key.pem").expanduser()
    base = Path(environ.get("XDG_CONFIG_HOME", ""))
    return (base if base.is_absolute() else Path("~/.config").expanduser()) / "mlcbuild" / "key.pem"


def create(path: Path) -> Signer:
    """A new key in a new file that only its owner can read. Raises UsageError when it cannot be written."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path}: there is a key already; it was not changed") from None
    except OSError as error:
        raise UsageError(f"{path}: the key cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    return _signer(private)


def load(path: Path) -> Signer | None:
    """The key of a file; None when there is none. Raises UsageError when it is no ed25519 key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: the key cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):  # TypeError: it is encrypted
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise UsageError(f"{path}: it holds no ed25519 key in PEM form; `mlcbuild keys new` makes one")
    return _signer(private)


def _signer(private: Ed25519PrivateKey) -> Signer:
    raw = private.public_key().public_bytes_raw()
    return Signer("ed25519:" + base64.urlsafe_b64encode(raw).decode().rstrip("="), private)


def seal(record: Record, signer: Signer | None) -> bytes:
    """A record as it travels."""
    body = record.encode()
    return body + (signer.sign(record.key, body) if signer is not None else b"")


def unseal(key: str, data: bytes, trust: Iterable[str] = ()) -> Record:
    """The record of `key` in what a remote holds, checked in all its parts.

    Raises RefusedError with the reason: no record, another key's, paths or digests that are none, a
    result that holds for one machine only, or no signature by a key in `trust`, where there are any.
    """
    lines = data.split(b"\n")
    body = b"\n".join(lines[:2]) + b"\n"
    try:
        if len(lines) < 3:
            raise ValueError("cut off")
        record = Record.decode(key, body)
        shared = record.made.shared
        consistent = record.consistent()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RefusedError("it is no whole record") from None
    if not consistent:
        raise RefusedError("its key does not follow from what it says it was made of")
    if shared is not True:
        raise RefusedError("it holds for one machine only")
    _check_rows(record.rows)
    trusted = frozenset(trust)
    if trusted and not trusted & signers(key, body, lines[2:]):
        raise RefusedError("it is not signed by a key that is trusted")
    return record


def signers(key: str, body: bytes, lines: Iterable[bytes]) -> frozenset[str]:
    """The public keys whose signatures are right."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    found = set()
    for line in lines:
        try:
            item = json.loads(line)
            public, signature = str(item["key"]), base64.b64decode(item["signature"], validate=True)
            if not is_public(public):
                continue
            verifier = Ed25519PublicKey.from_public_bytes(_decoded(public))
            verifier.verify(signature, _TAG + key.encode() + b"\0" + body)
        except (ValueError, KeyError, TypeError, RecursionError, InvalidSignature):
            continue
        found.add(public)
    return frozenset(found)


def _decoded(public: str) -> bytes:
    return base64.urlsafe_b64decode(public.removeprefix("ed25519:") + "=")


def _check_rows(rows: Iterable[tuple[str, str, int]]) -> None:
    """Raises RefusedError unless the rows are a tree of files that any system can hold."""
    files: set[str] = set()
    directories: set[str] = set()
    for path, digest, size in rows:
        parts = path.split("/")
        odd = re.search(r"[\x00-\x1f\x7f\\]", path) or not {"", ".", ".."}.isdisjoint(parts)
        if odd or path in files or not _DIGEST.fullmatch(digest) or not 0 <= size < 1 << 62:
            raise RefusedError(f"it names the file {path!r}")
        files.add(path)
        directories.update("/".join(parts[:end]) for end in range(1, len(parts)))
    if clash := files & directories:
        raise RefusedError(f"it names {min(clash)!r} as a file and as a directory")
