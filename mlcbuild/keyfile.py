"""Creates and reads the ed25519 keys that sign step records and provenance statements. They are stored in PEM
files and named by their public keys."""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild_format import regular

from mlcbuild.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_LARGEST = 1 << 16
"""Maximum size in bytes of a PEM file with a signing key."""
_PUBLIC = re.compile(r"ed25519:[A-Za-z0-9_-]{43}")


@dataclass(frozen=True)
class Signer:
    """An ed25519 private key for signatures, and the text that names its public key: "ed25519:" and 43
    characters of URL-safe base64."""

    public: str
    private: Ed25519PrivateKey = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """Returns the 64-byte ed25519 signature of a message; equal messages have equal signatures."""
        return self.private.sign(message)


def is_public(text: str) -> bool:
    """Returns True if a text has the form in which mlcbuild writes an ed25519 public key: "ed25519:" and 43
    characters of URL-safe base64 for 32 bytes, whatever these are."""
    return bool(_PUBLIC.fullmatch(text)) and len(_decoded(text)) == 32


def is_right(public: str, signature: bytes, message: bytes) -> bool:
    """Returns True if `signature` is a valid ed25519 signature of `message` by a key; False also for a
    signature of another length. public: the public key as "ed25519:" and URL-safe base64. Callers check it
    with `is_public` first: other spellings of a key may be accepted here, and text that does not decode to 32
    bytes raises ValueError."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(_decoded(public)).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def default_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the path of the file with the user's signing key: $MLCBUILD_KEY as an absolute path or, if it
    is not set, mlcbuild/key.pem in the user's configuration directory on this system; None if that is below a
    home directory which the system does not know. The file need not exist. environ: name of an environment
    variable -> value."""
    if chosen := environ.get("MLCBUILD_KEY"):
        return _expanded(chosen).absolute()
    base = Path(environ.get("XDG_CONFIG_HOME", ""))
    if sys.platform == "darwin":
        base = _expanded("~/Library/Application Support")
    elif not base.is_absolute():
        base = _expanded("~/.config")
    return base / "mlcbuild" / "key.pem" if base.is_absolute() else None


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's raises RuntimeError without a home


def create(path: Path) -> Signer:
    """Creates a signing key in a new file that only its owner can read and write, with missing directories,
    and returns the key. Raises UsageError if the file exists, which is not changed, or cannot be written."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        if os.path.lexists(path):
            raise UsageError(f"{path}: there is a key already; it was not changed") from None
        raise UsageError(f"{path}: the key cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
    except OSError as error:
        path.unlink()
        raise UsageError(f"{path}: the key cannot be written: {error.strerror}") from None
    return _signer(private)


def load(path: Path) -> Signer | None:
    """Reads the signing key in a file; returns None if the file does not exist. Raises UsageError for a file
    that cannot be read, is larger than 64 KiB, or holds anything but an unencrypted ed25519 key in PEM
    form."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(regular.read(path, _LARGEST), None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: the key cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key is encrypted
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise UsageError(f"{path}: it holds no ed25519 key in PEM form; `mlcbuild keys new` creates one")
    return _signer(private)


def load_own(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Signer | None:
    """Reads and returns the key with which this user signs: the one in the file `path` or, for None, in the
    one that `default_path` returns. Returns None, so that nothing is signed, if the user has no key. Raises
    UsageError, as `load` does, and if the file is missing although `path` or $MLCBUILD_KEY names it: a key
    that is misspelled, or not mounted, would leave results unsigned.

    environ: name of an environment variable -> value."""
    file = path or default_path(environ)
    signer = load(file) if file else None
    if signer is None and (path or environ.get("MLCBUILD_KEY")):
        named = "" if path else ", although MLCBUILD_KEY names it"
        raise UsageError(f"{file}: there is no key{named}; `mlcbuild keys new` creates one")
    return signer


def _signer(private: Ed25519PrivateKey) -> Signer:
    raw = private.public_key().public_bytes_raw()
    return Signer("ed25519:" + base64.urlsafe_b64encode(raw).decode().rstrip("="), private)


def _decoded(public: str) -> bytes:
    return base64.urlsafe_b64decode(public.removeprefix("ed25519:") + "=")
