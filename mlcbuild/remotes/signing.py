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
import re
from collections.abc import Iterable

from mlcbuild.canon import canonical
from mlcbuild.keyfile import Signer, is_public, is_right
from mlcbuild.store.records import Record

LARGEST = 64 << 20
"""Bytes of a record: more is not one."""
_TAG = b"mlcbuild-record/1\0"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class RefusedError(ValueError):
    """A record that must not be used. The message is the reason, the end of a sentence."""


def seal(record: Record, signer: Signer | None) -> bytes:
    """A record as it travels."""
    body = record.encode()
    if signer is None:
        return body
    found = base64.b64encode(signer.sign(_message(record.key, body))).decode()
    return body + canonical({"key": signer.public, "signature": found}) + b"\n"


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
    except Exception:  # whatever the bytes of somebody else make a parser raise
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
    found = set()
    for line in lines:
        try:
            item = json.loads(line)
            public, signature = str(item["key"]), base64.b64decode(item["signature"], validate=True)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if is_public(public) and is_right(public, signature, _message(key, body)):
            found.add(public)
    return frozenset(found)


def _message(key: str, body: bytes) -> bytes:
    return _TAG + key.encode() + b"\0" + body


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
