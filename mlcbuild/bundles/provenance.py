"""Writes and checks the provenance of bundles: a statement of the inputs from which a bundle was built,
signed if the builder has a key.

A bundle holds an in-toto statement with an SLSA predicate and, if the builder has a key, the same statement
in a DSSE envelope on one line, which other attestation tools read:

    provenance.json            the statement
    provenance.intoto.jsonl    {"payload": base64, "payloadType": ..., "signatures": [{"keyid", "sig"}]}

Formats: https://slsa.dev/spec/v1.0/provenance, https://github.com/secure-systems-lab/dsse
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import cast

from mlcbuild_format import regular, strict_json

from mlcbuild.canon import Json, canonical
from mlcbuild.errors import ProvenanceError
from mlcbuild.keyfile import Signer, is_public, is_right

STATEMENT = "provenance.json"
ENVELOPE = "provenance.intoto.jsonl"
_MANIFEST = "bundle.json"
_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://slsa.dev/provenance/v1"
_PAYLOAD = "application/vnd.in-toto+json"
_LARGEST = 64 << 20


@dataclass(frozen=True)
class Provenance:
    """The provenance statement of a bundle, whose subject and signatures have been checked."""

    statement: Mapping[str, Json]
    signers: tuple[str, ...]
    """Sorted public keys ("ed25519:" and URL-safe base64) whose signatures of the bundle's provenance
    statement are valid. The caller decides which keys to trust."""


def statement(
    manifest: bytes,
    parameters: Mapping[str, Json],
    keys: Mapping[str, str],
    dependencies: Iterable[Mapping[str, Json]],
    tools: Mapping[str, str],
) -> bytes:
    """Returns a provenance statement about one bundle as JSON text: an in-toto statement with an SLSA v1
    predicate.

    manifest: the bytes of bundle.json, the subject, which names every other file by its BLAKE3 digest, so
    that the statement covers them all without reading the weights again. parameters: those of the build.
    keys: name of a build step -> its cache key. dependencies: the sources, each as a resource descriptor.
    tools: name -> version. The statement holds no times, so the same build gives the same statement.
    """
    document = {
        "_type": _TYPE,
        "subject": [{"name": _MANIFEST, "digest": {"sha256": sha256(manifest).hexdigest()}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:mlcbuild:run:1",
                "externalParameters": dict(parameters),
                "internalParameters": {"steps": dict(keys)},
                "resolvedDependencies": [dict(item) for item in dependencies],
            },
            "runDetails": {"builder": {"id": "urn:mlcbuild", "version": dict(tools)}},
        },
    }
    return json.dumps(document, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def envelope(payload: bytes, signer: Signer) -> bytes:
    """Returns a provenance statement in a DSSE envelope, as one line of JSON, in bytes and with its newline.
    payload: bytes of the statement; signer: the key that signs it."""
    signature = base64.b64encode(signer.sign(_encoded(payload))).decode()
    document: dict[str, Json] = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": _PAYLOAD,
        "signatures": [{"keyid": signer.public, "sig": signature}],
    }
    return canonical(document) + b"\n"


def _encoded(payload: bytes) -> bytes:
    """Returns the bytes that a DSSE signature covers: "DSSEv1", the payload type and the payload, each of the
    two preceded by its length in bytes as a decimal number, with a space between all parts.
    """
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)


def check(bundle: Path, trust: Collection[str] = ()) -> Provenance:
    """Checks and returns the provenance of the bundle in a directory. Of the bundle only bundle.json is read,
    since it names the digests of the other files. trust: public keys, one of which must have signed the
    statement; if it is empty, the statement may be unsigned.

    Raises ProvenanceError if the statement or bundle.json is missing or cannot be read, the statement is
    about another bundle, any signature of it is invalid, or no key in `trust` has signed it."""
    payload = _bytes(bundle / STATEMENT)
    document = _document(bundle / STATEMENT, payload)
    actual = sha256(_bytes(bundle / _MANIFEST)).hexdigest()
    named = _subject(document)
    if named != actual:
        raise ProvenanceError(
            f"{bundle / STATEMENT}: it is about a {_MANIFEST} with sha256 {str(named)[:12]}, but this one "
            f"has {actual[:12]}: the bundle was changed after it was built, or the statement is another's"
        )
    path = bundle / ENVELOPE
    signers = tuple(sorted(set(_signers(path, payload)))) if path.exists() else ()
    if trust and not set(trust) & set(signers):
        who = f"signed by {', '.join(signers)}" if signers else "not signed"
        raise ProvenanceError(
            f"{bundle}: its provenance is {who}, but not by a trusted key; pass the signer's key with --trust"
        )
    return Provenance(document, signers)


def _bytes(path: Path) -> bytes:
    try:
        return regular.read(path, _LARGEST)
    except FileNotFoundError:
        raise ProvenanceError(
            f"{path}: not found, so the origin of the bundle is unknown; build the bundle "
            "again, or fetch all of its files"
        ) from None
    except OSError as error:
        raise ProvenanceError(f"{path}: cannot be read: {error.strerror}") from None


def _document(path: Path, payload: bytes) -> Mapping[str, Json]:
    try:
        document = strict_json.parse(payload)
        json.dumps(document, indent=1)  # raises for a document that is nested too deeply
        if document["_type"] == _TYPE and document["predicateType"] == _PREDICATE:
            return cast("Mapping[str, Json]", document)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ProvenanceError(f"{path}: it is not an in-toto statement with an SLSA v1 predicate")


def _subject(document: Mapping[str, Json]) -> object:
    """Returns the SHA-256, in hex, of the manifest bundle.json that a parsed provenance statement is about;
    None if the statement names none."""
    try:
        subjects = cast("list[dict[str, dict[str, str]]]", document["subject"])
        return next(item["digest"]["sha256"] for item in subjects if item["name"] == cast(object, _MANIFEST))
    except (KeyError, TypeError, StopIteration):
        return None


def _signers(path: Path, payload: bytes) -> Iterator[str]:
    """Yields the public keys, as text, that have signed the provenance statement `payload` in the file
    `path`, which holds a DSSE envelope on each line. Signatures by keys other than ed25519 are ignored.

    Raises ProvenanceError when the file cannot be read, or a line is not an envelope, is about another
    statement, or has an invalid signature."""
    for line in _bytes(path).splitlines():
        try:
            document = strict_json.parse(line)
            decoded = base64.b64decode(document["payload"], validate=True)
            typed = document["payloadType"] == _PAYLOAD
            signatures = [
                (str(item["keyid"]), base64.b64decode(item["sig"], validate=True))
                for item in document["signatures"]
            ]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ProvenanceError(f"{path}: it holds a line that is not a DSSE envelope") from None
        if not typed or decoded != payload:
            raise ProvenanceError(f"{path}: it is about another statement than {STATEMENT}")
        for public, signature in signatures:
            if not is_public(public):
                continue  # Signatures of kinds that this version does not support are ignored.
            if not is_right(public, signature, _encoded(payload)):
                raise ProvenanceError(f"{path}: the signature by {public} is invalid")
            yield public
