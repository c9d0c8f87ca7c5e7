"""Tests of untrusted bundles: each fault is reported in one printable sentence, without a traceback or a
crash."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mlcbuild_format import bundle
from mlcbuild_format.errors import BundleError, RequestError
from mlcbuild_format.fields import Json, parse_json, printable
from mlcbuild_runtime import untrusted
from mlcbuild_runtime.devices import gpu_program
from mlcbuild_runtime.text.tokenizer import Tokenizer

from tests.runtime.refusals import Damage, refusal

from . import mutations, shared
from .test_bundle import edit, put, section

EVERY = "MLCBUILD_TEST_EVERY" in os.environ


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory, which does not exist yet, in which the runtime records the files that a child
    process has loaded successfully."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "cache"


def link(name: str, to: str | None = None) -> Damage:
    def damage(path: Path) -> None:
        real = path.with_name("elsewhere")
        (path / name).rename(real)
        (path / name).symlink_to(to or real)

    return damage


def fifo(name: str) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return damage


def linked_folder(path: Path) -> None:
    other = path.with_name("folder")
    other.mkdir()
    (other / "x").write_bytes(b"")
    (path / "lib").symlink_to(other)
    put("lib/x", {"blake3": "0" * 64, "size": 0}, "files")(path)


def sparse(path: Path) -> None:
    os.truncate(path / "weights-00001-of-00001.safetensors", 1 << 40)


def sparse_and_listed(path: Path) -> None:
    sparse(path)
    edit(path, lambda actual: entry(actual, "weights-00001-of-00001.safetensors").update(size=1 << 40))


def large_tokenizer(path: Path) -> None:
    os.truncate(path / "tokenizer_config.json", files_limit := 1 << 30)
    edit(path, lambda actual: entry(actual, "tokenizer_config.json").update(size=files_limit))


def entry(actual: dict[str, Json], name: str) -> dict[str, Json]:
    listed = section(actual, "files")[name]
    assert isinstance(listed, dict)
    return listed


ODD_FILES: list[tuple[str, Damage, str]] = [
    ("manifest a FIFO", fifo("bundle.json"), "bundle.json: not a regular file"),
    ("manifest a device", link("bundle.json", "/dev/zero"), "bundle.json: not a regular file"),
    ("manifest a link", link("bundle.json"), "bundle.json: is a symbolic link"),
    (
        "manifest linked to itself",
        link("bundle.json", "bundle.json"),
        "bundle.json: cannot be read: Too many",
    ),
    ("tokenizer a FIFO", fifo("tokenizer.json"), "tokenizer.json: not a regular file"),
    ("library a link", link("model.so"), "model.so: is a symbolic link"),
    ("a folder a link", linked_folder, "lib: is a symbolic link"),
    ("provenance a FIFO", lambda path: os.mkfifo(path / "provenance.json"), "provenance.json: not a regular"),
    ("sparse weights", sparse, "has 1099511627776 bytes, but bundle.json says 4416"),
    ("sparse weights, listed", sparse_and_listed, "bytes behind the last tensor"),
    ("a large config", large_tokenizer, "tokenizer_config.json: has BLAKE3"),
    (
        "a manifest of 17 MB",
        lambda path: os.truncate(path / "bundle.json", 17 << 20),
        "more than 16777216 by",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [c[1:] for c in ODD_FILES], ids=[c[0] for c in ODD_FILES])
def test_odd_files(toy_copy: Path, damage: Damage, message: str) -> None:
    damage(toy_copy)
    assert message in refusal(toy_copy)


def test_a_directory_that_may_not_be_read(toy_copy: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("needs a user other than root, who may read everything")
    toy_copy.chmod(0)
    try:
        assert "cannot be read: Permission denied" in refusal(toy_copy)
    finally:
        toy_copy.chmod(0o755)


def test_a_cache_directory_that_cannot_be_read_is_not_used(
    toy_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may read every directory, but no account one with so long a name.
    monkeypatch.setenv("XDG_CACHE_HOME", f"/{'x' * 300}")
    manifest = bundle.read(toy_copy)
    untrusted.check(toy_copy, manifest)
    untrusted.check(toy_copy, manifest)


TEXTS: list[tuple[bytes, str]] = [
    (b"[" * 100_000, "nested too deeply"),
    (b"[" * 500 + b"]" * 500, "nested too deeply: at most 64"),
    (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
    ("{}".encode("utf-16"), "not UTF-8"),
    (b"", "Expecting value"),
    (b"1e999", "the number 1e999 is too large"),
    (b"-Infinity", "-Infinity is not JSON"),
    (b"9" * 5000, "is too large"),
    (b'["\\ud800"]', "half of a surrogate pair"),
    (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
    (b'{"a": 1, "a": 2}', "the key 'a' is there twice"),
    (b"{", "Expecting property name"),
]


@pytest.mark.parametrize(("data", "message"), TEXTS)
def test_json_that_is_refused(data: bytes, message: str, toy_copy: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_json(data)
    (toy_copy / "bundle.json").write_bytes(data)
    assert message in refusal(toy_copy)


def test_json_that_checkpoints_have() -> None:
    text = '{"model_max_length": 1000000000000000019884624838656, "x": ["\\ud83d\\ude42", "é", 1e-05, -0.0]}'
    assert parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 日本", "plain é 日本"),
        ("a\r\n\x1b[31m\x9b\x7f", "a\\r\\n\\x1b[31m\\x9b\\x7f"),
        ("\u202eabc\u2028", "\\u202eabc\\u2028"),
        ("\ud800", "\\ud800"),
        ("x" * 5000, "x" * 3997 + "..."),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert str(RequestError(text)) == shown
    shown.encode()


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_damage_at_random_gives_a_bundle_or_a_sentence(toy_copy: Path, toy_bundle: Path, name: str) -> None:
    """Checks that a bundle with a randomly damaged file is refused in one sentence, or that its tokenizer
    works."""
    is_tried = name.startswith("tokenizer")  # by a process each time
    for seed in range(400 if EVERY else 10 if is_tried else 200):
        for changed in (name, "bundle.json"):
            shutil.copy(toy_bundle / changed, toy_copy / changed)
        mutations.damage(toy_copy, name, seed)
        try:
            manifest = bundle.check(toy_copy)
            if is_tried:
                untrusted.check(toy_copy, manifest)
                Tokenizer.of(toy_copy, manifest).encode("once")
        except (BundleError, RequestError) as error:
            assert str(error).isprintable(), seed
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {name}") from error


@pytest.mark.parametrize("seed", range(8))
def test_damage_at_random_does_not_end_a_server_by_a_signal(toy_copy: Path, seed: int) -> None:
    name = [*mutations.MUTATIONS][seed % 4]
    mutations.damage(toy_copy, name, 1000 + seed)
    result = shared.run("-m", "tests.runtime.loads", str(toy_copy))
    assert (result.returncode, result.stderr) == (0, ""), seed
    assert len(result.stdout.splitlines()) <= 1


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (os.mkfifo, "not a regular file"),
        (huge, f"has more than {gpu_program.MAX_PROGRAM} bytes"),
        (lambda path: path.write_bytes(b"[" * 100_000), "it is nested too deeply"),
        (lambda path: path.write_bytes(b'{"format": "\xff"}'), "not UTF-8"),
        (lambda path: path.write_bytes(b"[]"), "must be an object"),
    ],
)
def test_gpu_programs_that_cannot_be_read(
    toy_bundle: Path, tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    manifest = replace(bundle.manifest(toy_bundle), library="program.json")
    write(tmp_path / "program.json")
    with pytest.raises(BundleError, match=message) as caught:
        gpu_program.read(tmp_path, manifest)
    assert str(caught.value).startswith(str(tmp_path / "program.json"))
