"""Tests of the keys that sign records and provenance: their files, their names and their signatures."""

from __future__ import annotations

import argparse
import os
import pwd
import resource
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from mlcbuild import keyfile, session
from mlcbuild.build.cluster import Address, worker_process
from mlcbuild.cli.store_verbs import keys
from mlcbuild.errors import UsageError
from tests import product


def test_a_key_is_written_once_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key.pem"
    key = keyfile.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_bytes()
    with pytest.raises(UsageError, match="there is a key already; it was not changed"):
        keyfile.create(path)
    assert path.read_bytes() == text
    again = keyfile.load(path)
    assert again is not None and again.public == key.public
    assert "private" not in repr(key)


def test_signatures(tmp_path: Path) -> None:
    key, other = (keyfile.create(tmp_path / name) for name in ("a", "b"))
    signature = key.sign(b"message")
    assert len(signature) == 64 and signature == key.sign(b"message")
    assert keyfile.is_right(key.public, signature, b"message")
    assert not keyfile.is_right(key.public, signature, b"another message")
    assert not keyfile.is_right(other.public, signature, b"message")
    assert not keyfile.is_right(key.public, signature[:-1], b"message")


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("ed25519:" + "A" * 43, True),
        ("ed25519:" + "A" * 42, False),
        ("ed25519:" + "A" * 44, False),
        ("ED25519:" + "A" * 43, False),
        ("ed25519:" + "+" * 43, False),
    ],
)
def test_names_of_public_keys(text: str, public: bool) -> None:
    assert keyfile.is_public(text) is public


UNKNOWN_CURVE = b"""-----BEGIN PRIVATE KEY-----
ME4CAQAwEAYHKoZIzj0CAQYFK4EEAAYENzA1AgEBBA6M+JoSpnKtLxjH/R3fl6Eg
Ax4ABKmwNrRgBuE9OjwbRbKK15vKW/UOPIPLA4tZtcw=
-----END PRIVATE KEY-----
"""
"""A private key on the curve secp112r1, which cryptography does not know, made by `openssl genpkey`."""


def test_files_that_hold_no_key(tmp_path: Path) -> None:
    assert keyfile.load(tmp_path / "nothing") is None
    other = generate_private_key(SECP256R1())
    encodings = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    texts = {
        "another kind": other.private_bytes(*encodings, serialization.NoEncryption()),
        "encrypted": other.private_bytes(*encodings, serialization.BestAvailableEncryption(b"secret")),
        "an unknown curve": UNKNOWN_CURVE,
        "no key": b"hello",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
        with pytest.raises(UsageError, match="it holds no ed25519 key in PEM form; `mlcbuild keys new`"):
            keyfile.load(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.pem")
    for unreadable in (tmp_path / "pipe.pem", Path("/dev/zero")):
        with pytest.raises(UsageError, match=r"the key cannot be read: it is a (named pipe|device), not a"):
            keyfile.load(unreadable)
    with pytest.raises(UsageError, match="the key cannot be read"):
        keyfile.load(tmp_path)
    with pytest.raises(UsageError, match="the key cannot be written"):
        keyfile.create(tmp_path / "no key" / "key.pem")


def test_where_a_key_lies() -> None:
    assert keyfile.default_path({"MLCBUILD_KEY": "/keys/mine.pem"}) == Path("/keys/mine.pem")
    if sys.platform != "darwin":
        assert keyfile.default_path({"XDG_CONFIG_HOME": "/c"}) == Path("/c/mlcbuild/key.pem")
        home = Path("~/.config/mlcbuild/key.pem").expanduser()
        assert keyfile.default_path({}) == keyfile.default_path({"XDG_CONFIG_HOME": "relative"}) == home


def test_a_home_that_is_not_known_holds_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container whose user has no name
    assert keyfile.default_path({}) is None
    assert keyfile.load_own(environ={}) is None
    monkeypatch.delenv("MLCBUILD_KEY", raising=False)
    with pytest.raises(UsageError, match=r"mlcbuild keys: this system knows no home .* with --file$"):
        keys(argparse.Namespace(file=None, action="new"))


def test_a_key_that_is_named_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a key that was misspelled, or not mounted in a container, leaves no result unsigned."""
    nothing = tmp_path / "nothing.pem"
    fault = f"^{nothing}: there is no key, although MLCBUILD_KEY names it; `mlcbuild keys new` creates one$"
    with pytest.raises(UsageError, match=fault):
        keyfile.load_own(environ={"MLCBUILD_KEY": str(nothing)})
    with pytest.raises(UsageError, match=r"~nobody-of-this-name/key\.pem: there is no key, although"):
        keyfile.load_own(environ={"MLCBUILD_KEY": "~nobody-of-this-name/key.pem"})
    with pytest.raises(UsageError, match=f"^{nothing}: there is no key; `mlcbuild keys new` creates one$"):
        keyfile.load_own(nothing)
    assert keyfile.load_own(environ={"XDG_CONFIG_HOME": str(tmp_path)}) is None
    monkeypatch.setenv("MLCBUILD_KEY", str(nothing))
    product.make(tmp_path, 1, ("q0f32",), ("x86-64-v2",))
    opened = session.open(tmp_path / "recipe.yaml", store=tmp_path / "store")
    with pytest.raises(UsageError, match=fault):
        opened.run()
    with pytest.raises(UsageError, match=fault):
        worker_process.serve(Address("127.0.0.1:1"), opened.store, worker_process.Offer("w", 1, 1, {}), print)


def test_a_disk_that_is_full_leaves_no_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(UsageError, match=r"key\.pem: the key cannot be written: File too large"):
            keyfile.create(tmp_path / "key.pem")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert keyfile.create(tmp_path / "key.pem").public
