"""Tests of the commands `mlcbuild inspect` and `mlcbuild verify`, with sound and with damaged bundles."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from tests.cli.commands import BUNDLE, Out, said


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_what_is_no_bundle_is_refused_in_a_sentence(here: Path, capsys: Out, verb: str) -> None:
    for path, sentence in (
        ("nowhere", "nowhere: does not exist, but a bundle is a directory that holds bundle.json"),
        ("recipe.yaml", "recipe.yaml: is a file, but a bundle is a directory that holds bundle.json"),
        ("tiny", "tiny: there is no bundle.json in it, so it is not a bundle"),
    ):
        stdout, stderr = said(capsys, 1, verb, path)
        assert not stdout
        assert stderr.rstrip("\n").endswith(sentence)
        assert len(stderr.splitlines()) == 1


def _manifest(bundle: Path) -> None:
    (bundle / "bundle.json").write_text("{")


def _library(bundle: Path) -> None:
    (bundle / "library.json").unlink()


def _facts_of_library(bundle: Path) -> None:
    path = bundle / "library.json"
    path.write_text("[" + " " * (path.stat().st_size - 2) + "]")


def _weights(bundle: Path) -> None:
    (path,) = bundle.glob("weights*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _manifest_with(**values: object) -> Callable[[Path], None]:
    def damage(bundle: Path) -> None:
        path = bundle / "bundle.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | values))

    return damage


def _fifo(bundle: Path) -> None:
    (bundle / "bundle.json").unlink()
    os.mkfifo(bundle / "bundle.json")


def _other_facts(text: str) -> Callable[[Path], None]:
    """Returns a function that replaces library.json of a bundle by `text`, and updates its digest in the
    manifest."""

    def damage(bundle: Path) -> None:
        (bundle / "library.json").write_text(text)
        path = bundle / "bundle.json"
        document = json.loads(path.read_bytes())
        digest = blake3(text.encode()).hexdigest()
        document["files"]["library.json"] = {"blake3": digest, "size": len(text)}
        path.write_text(json.dumps(document))

    return damage


def _with_source(bundle: Path, remark: str) -> None:
    """Adds a remark on the checkpoint to the header of a bundle's weights file, and updates the manifest."""
    (path,) = bundle.glob("weights*")
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"]["source"] = remark
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    data = len(text).to_bytes(8, "little") + text + data[end:]
    path.unlink()  # it may be linked to the store
    path.write_bytes(data)
    document = json.loads((bundle / "bundle.json").read_bytes())
    document["files"][path.name] = {"blake3": blake3(data).hexdigest(), "size": len(data)}
    (bundle / "bundle.json").write_text(json.dumps(document))


def _calibration(bundle: Path) -> None:
    """Adds a file calibration.json to a bundle, with an invalid value, "many", in place of the number of
    tokens. The manifest lists the file with its digest."""
    text = b'{"tokens": "many", "prompts": 3}'
    (bundle / "calibration.json").write_bytes(text)
    path = bundle / "bundle.json"
    document = json.loads(path.read_bytes())
    document["files"]["calibration.json"] = {"blake3": blake3(text).hexdigest(), "size": len(text)}
    path.write_text(json.dumps(document))


EVERY = ("inspect", "verify", "serve", "chat")
REFUSED: list[tuple[Callable[[Path], None], tuple[str, ...], str]] = [
    (_manifest, EVERY, "bundle.json: not valid JSON"),
    (_library, EVERY, "library.json: missing, but bundle.json lists it"),
    (_facts_of_library, EVERY, "library.json: has BLAKE3 "),
    (_weights, ("verify",), "weights-00001-of-00001.safetensors: "),
    (lambda bundle: (bundle / ".DS_Store").touch(), EVERY, ".DS_Store: the manifest does not list this file"),
    (
        lambda bundle: (bundle / "adapters").mkdir(),
        EVERY,
        "adapters: the manifest does not list this dir",
    ),
    (_fifo, EVERY, "bundle.json: not a regular file"),
    (
        _manifest_with(name="\x1b[31m\r\n"),
        EVERY,
        "'name' must be a non-empty string of at most 1000 printable",
    ),
    (_manifest_with(name="\ud800"), EVERY, "half of a surrogate pair"),
    (_manifest_with(verification={}), EVERY, "'verification.kl_mean' is missing"),
    (_manifest_with(scheme={}), EVERY, "'scheme.name' is missing"),
    (_manifest_with(**{"\x1b[2J": 1}), EVERY, "unknown field '\\x1b[2J'"),
    (_other_facts("[" * 100_000), ("inspect",), "library.json: not valid JSON"),
    (_other_facts("[]"), ("inspect",), "library.json: must hold a JSON object"),
    (
        _other_facts('{"kernels": {"a": "\\u001b[31m"}}'),
        ("inspect",),
        "'kernels.a' must be a non-empty string",
    ),
    (_calibration, ("inspect",), "calibration.json: 'tokens' must be an integer of at least 1"),
    (_other_facts('{"kernels": []}'), ("inspect",), "library.json: kernels must be an object"),
]


@pytest.mark.parametrize(("damage", "verbs", "sentence"), REFUSED)
def test_a_damaged_bundle_is_refused_in_a_line(
    bundle_copy: Callable[[str], Path],
    capsys: Out,
    damage: Callable[[Path], None],
    verbs: tuple[str, ...],
    sentence: str,
) -> None:
    bundle = bundle_copy("q4f16_1")
    damage(bundle)
    for verb in verbs:
        stdout, stderr = said(capsys, 1, verb, str(bundle))
        assert not stdout
        assert sentence in stderr
        assert stderr.endswith("\n") and stderr[:-1].isprintable(), stderr


def test_what_is_added_to_a_bundle_does_not_pass_with_its_provenance(
    bundle_copy: Callable[[str], Path], capsys: Out
) -> None:
    bundle = bundle_copy("q4f16_1")
    said(capsys, 0, "verify", str(bundle), "--provenance")
    (bundle / "chat_template.json").write_text("{}")
    _, stderr = said(capsys, 1, "verify", str(bundle), "--provenance")
    assert "chat_template.json: the manifest does not list this file" in stderr


def test_a_strangers_provenance_is_shown_escaped(bundle_copy: Callable[[str], Path], capsys: Out) -> None:
    bundle = bundle_copy("q4f16_1")
    path = bundle / "provenance.json"
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(document | {"x": "\x9b31m\u202e\ud800"}))
    stdout, _ = said(capsys, 0, "verify", str(bundle), "--provenance", "--json")
    assert json.loads(stdout)["statement"]["x"] == "\x9b31m\u202e\ud800"
    assert stdout.replace("\n", "").isprintable()
    path.write_text(json.dumps(document)[:-2] + ',"x":' + "[" * 900 + "]" * 900 + "}")
    _, stderr = said(capsys, 1, "verify", str(bundle), "--provenance", "--json")
    assert "provenance.json: it is not an in-toto statement" in stderr
    document["subject"][0]["digest"]["sha256"] = "\x1b[2J"
    path.write_text(json.dumps(document))
    _, stderr = said(capsys, 1, "verify", str(bundle), "--provenance")
    assert "sha256 \\x1b[2J" in stderr


def test_inspect_says_what_a_bundle_is(built: Path, capsys: Out) -> None:
    rows = [line.split(maxsplit=1) for line in said(capsys, 0, "inspect", BUNDLE)[0].splitlines()]
    facts = {name: text for name, text in rows if name != "kernel"}
    manifest = json.loads((built / BUNDLE / "bundle.json").read_bytes())
    assert facts["name"] == manifest["name"]
    assert facts["signature"] == manifest["signature"]
    assert facts["limits"] == "context 512, prefill 128, batch 8"
    assert f"top-1 agreement {manifest['verification']['top1_agreement']}" in facts["verified"]
    document = json.loads(said(capsys, 0, "inspect", BUNDLE, "--json")[0])
    assert document.pop("source") == ""
    assert {**manifest, "kernels": document["kernels"], "fallbacks": document["fallbacks"]} == document
    uses = [use for name, text in rows if name == "kernel" for use in text.split(" for ")[1].split(", ")]
    assert sorted(uses) == sorted(use.removesuffix(".weight") for use in document["kernels"])


def test_inspect_says_how_the_checkpoint_was_read(bundle_copy: Callable[[str], Path], capsys: Out) -> None:
    bundle, remark = bundle_copy("q4f16_1"), "zero points of version 1"
    _with_source(bundle, remark)
    rows = [line.split(maxsplit=1) for line in said(capsys, 0, "inspect", str(bundle))[0].splitlines()]
    assert ["source", remark] in rows
    assert json.loads(said(capsys, 0, "inspect", str(bundle), "--json")[0])["source"] == remark


def test_inspect_names_what_is_slow(bundle_copy: Callable[[str], Path], capsys: Out) -> None:
    bundle = bundle_copy("q4f16_1")
    about = json.loads((bundle / "library.json").read_bytes())
    reason = "no vector instructions"
    text = json.dumps({**about, "fallbacks": {"attn.o.weight": reason}}).encode()
    (bundle / "library.json").write_bytes(text)
    manifest = json.loads((bundle / "bundle.json").read_bytes())
    manifest["files"]["library.json"] = {"blake3": blake3(text).hexdigest(), "size": len(text)}
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    lines = said(capsys, 0, "inspect", str(bundle))[0].splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("slow ")] == [f"attn.o: {reason}"]


def test_a_port_that_cannot_be_is_refused_before_loading(built: Path, capsys: Out) -> None:
    _, stderr = said(capsys, 3, "serve", BUNDLE, "--port", "99999")
    assert "a port is a number from 0 to 65535" in stderr


def test_bundles_may_stand_after_an_option(built: Path, capsys: Out) -> None:
    _, stderr = said(capsys, 3, "serve", BUNDLE, "--port", "0", BUNDLE, "--browser")
    assert "--browser serves one bundle, and 2 were passed" in stderr
