"""Signs records of build steps and checks signatures, in the form that remote caches and archives hold.

The two lines of a record are followed by one line for each signature:

    {"key":"ed25519:<public key>","signature":"<base64>"}

The signature covers a tag that only record signatures have, the key and all bytes of the record. Replaying an
older record is harmless: the key holds the digests of all inputs, code and tool versions, so both records are
results of exactly this key.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

from mlcbuild_format import strict_json

from mlcbuild.canon import canonical
from mlcbuild.keyfile import Signer, is_public, is_right
from mlcbuild.store.records import Record

_TAG = b"mlcbuild-record/1\0"


class RefusedError(ValueError):
    """The error for a step record, or an archive of some, that is damaged, belongs to another key or lacks a
    required signature, and is not used. Its message is the end of a sentence, such as "it is cut off"."""


def seal(record: Record, signer: Signer | None) -> bytes:
    """Returns a step record in the form that remote caches hold, as bytes, with a signature unless `signer`
    is None."""
    body = record.encode()
    if signer is None:
        return body
    signature = base64.b64encode(signer.sign(_message(record.key, body))).decode()
    return body + canonical({"key": signer.public, "signature": signature}) + b"\n"


def unseal(key: str, data: bytes, trust: Iterable[str] = ()) -> Record:
    """Decodes the step record of `key` from a remote cache, and checks that the key is the digest of the
    inputs that it lists. If there are public keys in `trust`, one of them must have signed it. Raises
    RefusedError for a record that is damaged, belongs to another key, is valid on one machine only, or lacks
    a trusted signature."""
    # A record is two lines; it may have many megabytes, so it is not split into copies.
    end = data.find(b"\n", data.find(b"\n") + 1) + 1  # 0 if there are fewer lines
    body = data[:end]
    try:
        if not end:
            raise ValueError("it is cut off")
        record = Record.checked(key, body)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    if not record.info.shared:
        raise RefusedError("it is valid on one machine only")
    trusted = frozenset(trust)
    if trusted and not trusted & signers(key, body, data[end:].split(b"\n")):
        raise RefusedError("it is not signed by a trusted key")
    return record


def signers(key: str, body: bytes, lines: Iterable[bytes]) -> frozenset[str]:
    """Returns the public keys that have validly signed a step record. key: the record's key; body: the
    record's bytes; lines: the lines after the record, with signatures; malformed and wrong ones are
    ignored."""
    valid = set()
    for line in lines:
        try:
            item = strict_json.parse(line)
            public, signature = str(item["key"]), base64.b64decode(item["signature"], validate=True)
        except (ValueError, KeyError, TypeError):
            continue
        if is_public(public) and is_right(public, signature, _message(key, body)):
            valid.add(public)
    return frozenset(valid)


def _message(key: str, body: bytes) -> bytes:
    return _TAG + key.encode() + b"\0" + body
