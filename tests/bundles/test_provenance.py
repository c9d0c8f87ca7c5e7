"""Tests of provenance statements of bundles: their signatures, and the reasons for which they are refused."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from mlcbuild import keyfile
from mlcbuild.bundles import provenance
from mlcbuild.errors import ProvenanceError
from tests.conftest import checked, mlcbuild, project

RECIPE = """\
version: 1
models: {tiny: ./tiny}
quantizations: [q4f16_1]
targets: [host]
compile: {context_window: 512, prefill_chunk: 128, max_batch: 8}
"""


@pytest.fixture
def key(tmp_path: Path) -> keyfile.Signer:
    return keyfile.create(tmp_path / "key.pem")


def made(manifest: bytes = b"{}") -> bytes:
    return provenance.statement(manifest, {"recipe": "r"}, {"a": "1"}, [{"name": "x"}], {"tool": "1"})


@pytest.fixture
def bundle(tmp_path: Path, key: keyfile.Signer) -> Path:
    """Returns a directory with a manifest, its provenance statement and the signed statement."""
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "bundle.json").write_bytes(b"{}")
    (path / provenance.STATEMENT).write_bytes(made())
    (path / provenance.ENVELOPE).write_bytes(provenance.envelope(made(), key))
    return path


def test_a_statement_is_the_same_bytes_for_the_same_build(key: keyfile.Signer) -> None:
    assert made() == made()
    assert provenance.envelope(made(), key) == provenance.envelope(made(), key)
    assert json.loads(made())["predicate"]["runDetails"]["builder"]["version"] == {"tool": "1"}


def test_an_envelope_is_what_dsse_says(key: keyfile.Signer) -> None:
    document = json.loads(provenance.envelope(made(), key))
    assert document["payloadType"] == "application/vnd.in-toto+json"
    assert base64.b64decode(document["payload"]) == made()
    # The pre-authentication encoding of the DSSE specification, written out.
    signed = b"DSSEv1 28 application/vnd.in-toto+json " + str(len(made())).encode() + b" " + made()
    (signature,) = document["signatures"]
    raw = base64.urlsafe_b64decode(signature["keyid"].removeprefix("ed25519:") + "=")
    Ed25519PublicKey.from_public_bytes(raw).verify(base64.b64decode(signature["sig"]), signed)


def test_a_signed_statement_is_checked(bundle: Path, key: keyfile.Signer, tmp_path: Path) -> None:
    assert provenance.check(bundle).signers == (key.public,)
    assert provenance.check(bundle, [key.public]).statement["_type"] == "https://in-toto.io/Statement/v1"
    other = keyfile.create(tmp_path / "other.pem")
    with pytest.raises(ProvenanceError, match=rf"signed by {key.public}, but not by a trusted key"):
        provenance.check(bundle, [other.public])
    path = bundle / provenance.ENVELOPE
    path.write_bytes(path.read_bytes() + provenance.envelope(made(), other))
    assert provenance.check(bundle, [other.public]).signers == tuple(sorted([key.public, other.public]))
    path.unlink()
    assert provenance.check(bundle).signers == ()
    with pytest.raises(ProvenanceError, match="its provenance is not signed, but not by a trusted key"):
        provenance.check(bundle, [key.public])


def change(bundle: Path, edit: Callable[[Any], object]) -> None:
    path = bundle / provenance.ENVELOPE
    document = json.loads(path.read_bytes())
    edit(document)
    path.write_text(json.dumps(document))


def replaced(bundle: Path) -> None:
    (bundle / provenance.STATEMENT).unlink()
    (bundle / provenance.STATEMENT).mkdir()


def flipped(document: Any) -> None:
    (signature,) = document["signatures"]
    raw = bytearray(base64.b64decode(signature["sig"]))
    raw[5] ^= 1
    signature["sig"] = base64.b64encode(raw).decode()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another manifest": (
        lambda b: (b / "bundle.json").write_bytes(b'{"a": 1}'),
        r"it is about a bundle.json with sha256 44136fa355b3, but this one has",
    ),
    "no statement": (
        lambda b: (b / "provenance.json").unlink(),
        "not found, so the origin of the bundle is unknown",
    ),
    "not JSON": (
        lambda b: (b / "provenance.json").write_bytes(b"[" * 100_000),
        "it is not an in-toto statement",
    ),
    "another kind": (
        lambda b: (b / "provenance.json").write_text('{"_type": "x"}'),
        "it is not an in-toto statement with an SLSA v1 predicate",
    ),
    "no subject": (
        lambda b: (b / "provenance.json").write_bytes(made().replace(b'"bundle.json"', b'"other.json"')),
        "it is about a bundle.json with sha256 None",
    ),
    "a directory": (
        replaced,
        r"provenance.json: cannot be read: it is a directory, not a regular file",
    ),
    "a huge file": (
        lambda b: os.truncate(b / "provenance.intoto.jsonl", 65 << 20),
        "cannot be read: it is larger than 67108864 bytes",
    ),
    "a line that is none": (
        lambda b: (b / "provenance.intoto.jsonl").write_text("nothing\n"),
        "it holds a line that is not a DSSE envelope",
    ),
    "a changed signature": (lambda b: change(b, flipped), "the signature by ed25519:[^ ]+ is invalid"),
    "a signature of no length": (
        lambda b: change(b, lambda d: d["signatures"][0].update(sig="")),
        "the signature by ed25519:[^ ]+ is invalid",
    ),
    "another type": (
        lambda b: change(b, lambda d: d.update(payloadType="text/plain")),
        "it is about another statement than provenance.json",
    ),
    "another statement": (
        lambda b: change(b, lambda d: d.update(payload=base64.b64encode(made(b"[]")).decode())),
        "it is about another statement than provenance.json",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_refused_with_the_reason(name: str, bundle: Path) -> None:
    damage, message = FAULTS[name]
    damage(bundle)
    with pytest.raises(ProvenanceError, match=message):
        provenance.check(bundle)


def test_keys_of_other_kinds_count_for_nothing(bundle: Path) -> None:
    change(bundle, lambda document: document["signatures"][0].update(keyid="someone"))
    assert provenance.check(bundle).signers == ()


def test_a_run_with_a_key_signs_and_verify_says_who(
    common_store: Path, tiny_bundles: Path, tmp_path: Path, key: keyfile.Signer
) -> None:
    recipe = project(tmp_path / "project", RECIPE)
    checked(
        mlcbuild("run", recipe, store=common_store, variables={"MLCBUILD_KEY": str(tmp_path / "key.pem")})
    )
    path = tmp_path / "project" / "dist" / "tiny-q4f16_1-host"

    def verify(*options: str, bundle: Path = path) -> tuple[int, str, str]:
        result = mlcbuild("verify", bundle, *options, store=common_store)
        return result.returncode, result.stdout, result.stderr

    code, said, _ = verify("--provenance")
    assert (code, said.splitlines()[-1]) == (
        0,
        f"{path}: its provenance is about this bundle; signed by {key.public}",
    )
    code, said, _ = verify("--trust", key.public, "--json")
    assert code == 0 and json.loads(said)["signers"] == [key.public]
    assert verify("--trust", "me")[0::2] == (
        2,
        "mlcbuild verify: --trust me: a key is ed25519: and 43 characters\n",
    )
    unsigned = tiny_bundles / "dist" / "tiny-q4f16_1-host"
    assert verify("--provenance", bundle=unsigned)[1].endswith("about this bundle; it is not signed\n")
    code, _, error = verify("--trust", key.public, bundle=unsigned)
    assert code == 1 and "its provenance is not signed, but not by a trusted key" in error
    broken = mlcbuild("run", recipe, store=common_store, variables={"MLCBUILD_KEY": str(recipe)})
    assert broken.returncode == 2 and "it holds no ed25519 key" in broken.stderr
