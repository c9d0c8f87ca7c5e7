"""Tests of signed records: which are accepted, and which are refused."""

from __future__ import annotations

import base64
import json
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild import keyfile
from mlcbuild.build.graph import Graph
from mlcbuild.remotes import Remote, signing
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.records import LARGEST
from tests.caches import serving
from tests.conftest import checked, mlcbuild
from tests.remotes.users import BUILT, REUSED, User, by_name, statuses, step


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> keyfile.Signer:
    monkeypatch.setenv("MLCBUILD_KEY", str(tmp_path / "key.pem"))
    return keyfile.create(tmp_path / "key.pem")


class Signing(User):
    """A simulated user who signs all uploads."""

    signer: keyfile.Signer | None = None

    def sharing(self) -> Sharing:
        return Sharing(self.store, [Link(remote, self.signer) for remote in self.remotes])


def signed(root: Path, url: str, signer: keyfile.Signer | None) -> Signing:
    user = Signing(root, url)
    user.signer = signer
    return user


# Signatures


def test_records_signed_by_a_trusted_key_are_used(tmp_path: Path, key: keyfile.Signer) -> None:
    with serving() as cache:
        signed(tmp_path / "one", cache.url, key).run()
        second = User(tmp_path / "two", cache.url, trust=("ed25519:" + "A" * 43, key.public))
        assert statuses(second.run()) == REUSED and second.warnings() == []
        assert statuses(User(tmp_path / "three", cache.url).run()) == REUSED, "who asks for none needs none"


def test_records_that_nobody_trusted_signed_are_refused(tmp_path: Path, key: keyfile.Signer) -> None:
    other = keyfile.create(tmp_path / "other.pem")
    for signer in (None, other):
        with serving() as cache:
            signed(tmp_path / f"one{signer}", cache.url, signer).run()
            second = User(tmp_path / f"two{signer}", cache.url, trust=(key.public,))
            assert statuses(second.run()) == BUILT
            assert second.warnings()[0].endswith("is refused: it is not signed by a trusted key")
            third = signed(tmp_path / f"three{signer}", cache.url, key)
            third.remotes = [Remote(cache.url, trust=(key.public,))]
            assert third.run().ok
            last = User(tmp_path / f"four{signer}", cache.url, trust=(key.public,))
            assert statuses(last.run()) == REUSED, "a trusted result replaced the others"


@pytest.mark.parametrize("is_removed", [False, True])
def test_copies_of_records_are_used_only_under_the_keys_that_were_trusted(
    is_removed: bool, tmp_path: Path, key: keyfile.Signer
) -> None:
    """Checks the copies that a store keeps of records whose files it has not downloaded. is_removed: True if
    the remote cache from which they come is replaced by another one."""
    other = keyfile.create(tmp_path / "other.pem")
    with serving() as cache, serving() as second:

        def known(*trust: str, remote: str = "") -> set[str]:
            sharing = User(tmp_path / "two", remote or cache.url, mode="read", trust=trust).sharing()
            return {name for name, step_key in keys.items() if sharing.find(step_key) is not None}

        for signer, trust in ((None, ()), (key, (key.public,))):
            result = signed(tmp_path / f"one{signer}", cache.url, signer).run()
            keys = {actual.name: actual.record.key for actual in result.steps if actual.record is not None}
            user = User(tmp_path / "two", cache.url, mode="read", trust=trust)
            for step_key in keys.values():
                record = user.sharing().find(step_key)
                assert record is not None
                user.sharing().keep(record)
            cache.content.clear()
            url = second.url if is_removed else cache.url
            assert known(remote=url) == {*keys}
            assert known(key.public, other.public, remote=url) == ({*keys} if signer else set())
            assert not known(other.public, remote=url)
            for step_key in keys.values():
                user.sharing().forget(step_key)


def test_an_older_record_is_not_taken_for_the_present_one(tmp_path: Path, key: keyfile.Signer) -> None:
    """Checks that an old record is not accepted under a new key, even if a trusted key signed it."""
    with serving() as cache:
        before, after = (Graph([step("a", text=text)]) for text in ("old", "new"))
        signed(tmp_path / "one", cache.url, key).run(before)
        (old,) = cache.names("ac")
        signed(tmp_path / "two", cache.url, key).run(after)
        (new,) = set(cache.names("ac")) - {old}
        cache.content[new] = cache.content[old]
        user = User(tmp_path / "three", cache.url, trust=(key.public,))
        result = user.run(after)
        assert statuses(result) == {"a": "built"} and user.text(result, "a") == "new"
        (warning,) = user.warnings()
        assert "its key does not follow" in warning


def other_key(data: bytes, signer: keyfile.Signer) -> bytes:
    return data.replace(signer.public.encode(), b"ed25519:" + b"B" * 43)


def other_record(data: bytes, signer: keyfile.Signer) -> bytes:
    return data.replace(b'"measured":[', b'"measured":[1')


def no_base64(data: bytes, signer: keyfile.Signer) -> bytes:
    return data.replace(b'"signature":"', b'"signature":"*')


def no_json(data: bytes, signer: keyfile.Signer) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:2]) + b'{"key":1}\n[]\nnonsense\n'


def deep(data: bytes, signer: keyfile.Signer) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:2]) + b"[" * 100_000 + b"\n"


@pytest.mark.parametrize("change", [other_key, other_record, no_base64, no_json, deep])
def test_signatures_that_do_not_fit_are_none(
    change: Callable[[bytes, keyfile.Signer], bytes], tmp_path: Path, key: keyfile.Signer
) -> None:
    record = by_name(User(tmp_path / "one").run())["a"].record
    assert record is not None
    data = signing.seal(record, key)
    assert signing.unseal(record.key, data, [key.public]) == record
    assert change(data, key) != data
    with pytest.raises(signing.RefusedError, match="it is not signed by a trusted key"):
        signing.unseal(record.key, change(data, key), [key.public])


def test_a_signature_is_what_the_format_says(tmp_path: Path, key: keyfile.Signer) -> None:
    """Checks a record's signature by the description of its format, with the package cryptography only."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    record = by_name(User(tmp_path / "one").run())["a"].record
    assert record is not None
    first, second, line = signing.seal(record, key).splitlines(keepends=True)
    document = json.loads(line)
    raw = base64.urlsafe_b64decode(document["key"].removeprefix("ed25519:") + "=")
    message = b"mlcbuild-record/1\0" + record.key.encode() + b"\0" + first + second
    Ed25519PublicKey.from_public_bytes(raw).verify(base64.b64decode(document["signature"]), message)


def test_a_record_that_is_too_large_is_refused_without_copies_of_it() -> None:
    data = b'{"files": []}\n' + b"x" * LARGEST + b"\n"
    tracemalloc.start()
    try:
        with pytest.raises(signing.RefusedError, match="it has more than"):
            signing.unseal("0" * 64, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * len(data)
    for cut in (b"", b"{}", b"{}\n", b"{}\n{}"):
        with pytest.raises(signing.RefusedError, match="it is cut off"):
            signing.unseal("0" * 64, cut)


def test_keys_are_made_once_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key.pem"

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return mlcbuild("keys", *command, "--file", path, store=tmp_path / "store")

    public = checked(run("new")).splitlines()[-1]
    assert keyfile.is_public(public)
    assert path.stat().st_mode & 0o777 == 0o600
    shown = json.loads(checked(run("show", "--json")))
    assert shown == {"file": str(path), "public": public}
    again = run("new")
    assert (again.returncode, again.stderr) == (2, f"{path}: there is a key already; it was not changed\n")
    path.chmod(0o644)
    path.write_text("something else")
    broken = run("show")
    assert broken.returncode == 2 and "it holds no ed25519 key in PEM form" in broken.stderr
    path.unlink()
    missing = run("show")
    assert "there is no key; `mlcbuild keys new` creates one" in missing.stderr
