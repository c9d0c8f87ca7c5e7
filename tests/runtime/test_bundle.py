"""Tests of reading bundles, and of bundles that are damaged in many ways: each is refused with one sentence,
without a traceback and without a crash."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from mlcbuild_format import bundle, weights
from mlcbuild_format.errors import BundleError
from mlcbuild_format.fields import Json

from . import shared, toy

WEIGHTS = "weights-00001-of-00001.safetensors"


def document(path: Path) -> dict[str, Json]:
    actual: dict[str, Json] = json.loads((path / "bundle.json").read_bytes())
    return actual


def section(actual: dict[str, Json], key: str) -> dict[str, Json]:
    inner = actual[key]
    assert isinstance(inner, dict)
    return inner


def edit(path: Path, change: Callable[[dict[str, Json]], object]) -> None:
    """Reads a bundle's manifest, bundle.json, calls `change` with its content, a dict to be changed in place,
    and writes it back."""
    actual = document(path)
    change(actual)
    (path / "bundle.json").write_text(json.dumps(actual))


def reseal(path: Path) -> None:
    """Updates sizes and digests in bundle.json after files were damaged, so that other checks must detect the
    damage."""

    def change(actual: dict[str, Json]) -> None:
        for name, entry in section(actual, "files").items():
            assert isinstance(entry, dict)
            file = toy.describe(path / name)
            entry.update(blake3=file.blake3, size=file.size)

    edit(path, change)


def put(key: str, value: Json, inside: str | None = None) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        edit(path, lambda actual: (section(actual, inside) if inside else actual).update({key: value}))

    return damage


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, size)


def cut_and_reseal(name: str, size: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path / name, size)
        reseal(path)

    return damage


def flip(name: str, place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[place] ^= 0x55
        (path / name).write_bytes(data)

    return damage


def write(name: str, data: bytes, again: bool = True) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).write_bytes(data)
        if again:
            reseal(path)

    return damage


def header(**changes: Json) -> Callable[[Path], None]:
    """Returns a function that replaces fields in the JSON header of a bundle's weights file by `changes`, and
    updates the manifest."""

    def damage(path: Path) -> None:
        data = (path / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        actual = json.loads(data[8 : 8 + length]) | changes
        text = json.dumps(actual).encode()
        (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        reseal(path)

    return damage


def other_weights(path: Path) -> None:
    """Replaces the weights of a bundle by a valid weights file of another model, whose signature (the digest
    of the model's tensors) differs from that in the manifest."""
    toy.write_weights(path / WEIGHTS, "ab" * 32)
    reseal(path)


def other_model(path: Path) -> None:
    """Replaces the weights of a bundle and the signature (digest of the model's tensors) in its manifest by
    those of another model, so that only the library does not fit."""
    toy.write_weights(path / WEIGHTS, "ab" * 32)
    put("signature", "ab" * 32)(path)
    reseal(path)


def elf_with_far_segment(path: Path) -> None:
    """Damages a library's headers so that they claim more bytes than the file has. Loading it without a check
    would end the process by SIGBUS."""
    data = bytearray((path / "model.so").read_bytes())
    if data[:4] != b"\x7fELF":  # another system's library: cutting it has the same effect
        del data[len(data) // 2 :]
    else:
        (programs,) = struct.unpack_from("<Q", data, 32)
        struct.pack_into("<Q", data, programs + 32, 1 << 40)
    (path / "model.so").write_bytes(data)
    reseal(path)


def foreign_library(path: Path) -> None:
    """Replaces the library of a bundle by a valid shared library that contains no model."""
    (path / "model.so").write_bytes(Path(str(find_library("blake3.blake3"))).read_bytes())
    reseal(path)


def find_library(module: str) -> str | None:
    spec = find_spec(module)
    return spec.origin if spec is not None else None


def metadata_text(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Returns a function that replaces the text `old` in a bundle's library by `new`, which must have the
    same length, and updates the manifest."""

    def damage(path: Path) -> None:
        data = (path / "model.so").read_bytes()
        assert data.count(old) == 1 and len(old) == len(new)
        (path / "model.so").write_bytes(data.replace(old, new))
        reseal(path)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def directory_instead(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).mkdir()


def no_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    edit(path, lambda actual: section(actual, "files").pop("tokenizer.json"))


Damage = tuple[str, Callable[[Path], None], str]
"""A kind of damage: its name, the function that does it, and a part of the expected message."""


READ: list[Damage] = [
    ("truncated manifest", cut("bundle.json", 300), "not valid JSON"),
    ("empty manifest", cut("bundle.json", 0), "not valid JSON"),
    ("manifest not UTF-8", write("bundle.json", b'{"a": "\xff"}', False), "not valid JSON"),
    ("manifest with NaN", write("bundle.json", b'{"a": NaN}', False), "NaN is not JSON"),
    (
        "manifest with a key twice",
        write("bundle.json", b'{"a": 1, "a": 2}', False),
        "'a' is there twice",
    ),
    ("manifest is a list", write("bundle.json", b"[]", False), "the document must be an object"),
    ("unknown version", put("format", "mlcbuild-bundle/2"), "'format' must be .*, found 'mlcbuild-bundle/2'"),
    ("unknown field", put("extra", 1), "unknown field 'extra'"),
    ("missing field", lambda p: edit(p, lambda d: d.pop("limits")), "'limits' is missing"),
    ("wrong type", put("page_size", "16", "limits"), "'limits.page_size' must be an integer"),
    ("boolean for integer", put("max_batch", True, "limits"), "'limits.max_batch' must be an integer"),
    ("end token out of range", put("eos_token_ids", [260], "serving"), "'serving' names token 260"),
    ("temperature of text", put("temperature", "hot", "serving"), "'serving.temperature' must be a number"),
    ("path outside", put("../x", {"blake3": "0" * 64, "size": 0}, "files"), "not a plain path"),
    ("path absolute", put("/etc/passwd", {"blake3": "0" * 64, "size": 0}, "files"), "not a plain path"),
    ("bad digest", put("x", {"blake3": "xyz", "size": 0}, "files"), "must be a string of the form"),
    ("library not listed", put("library", "other.so"), "does not list 'other.so'"),
    ("weights not listed", put("weights", ["w"]), "does not list 'w'"),
    ("no weights", put("weights", []), "'weights' names no file"),
    ("library missing", remove("model.so"), "model.so: missing, but bundle.json lists it"),
    ("weights missing", remove(WEIGHTS), "missing, but bundle.json lists it"),
    ("weights a directory", directory_instead, "not a regular file"),
    ("library changed", flip("model.so", 5000), "model.so: has BLAKE3 .*, but bundle.json says"),
    ("tokenizer changed", flip("tokenizer.json", 100), "tokenizer.json: has BLAKE3 .*, but"),
    ("weights truncated", cut(WEIGHTS, 1000), "has 1000 bytes, but bundle.json says"),
    ("library cut in its header", cut_and_reseal("model.so", 50), "not a whole shared library"),
    ("library of text", write("model.so", b"hello" * 1000), "not a whole shared library"),
    ("weights header cut", cut_and_reseal(WEIGHTS, 100), "not a whole weights file: it is truncated"),
    ("weights of noise", write(WEIGHTS, b"\x10" + b"\0" * 7 + b"x" * 100), "its header is not valid JSON"),
    ("weights of another format", header(__metadata__={"format": "pt"}), "'__metadata__.format' must be"),
    (
        "weights of a strange dtype",
        header(table={"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}),
        "'table.dtype' must be one of",
    ),
    (
        "weights with false offsets",
        header(table={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}),
        "'table.data_offsets' do not hold",
    ),
]
"""Kinds of damage that are detected by reading the manifest, sizes, digests and headers."""


LOADED: list[Damage] = [
    ("no manifest", remove("bundle.json"), "there is no bundle.json in it"),
    ("manifest nested deeply", write("bundle.json", b"[" * 200_000, False), "not valid JSON"),
    ("other limits", put("context_window", 4096, "limits"), "limits.context_window = 256, but .* says 4096"),
    ("other page size", put("page_size", 32, "limits"), "limits.page_size = 16, but .* says 32"),
    (
        "other config",
        lambda p: edit(p, lambda d: section(section(d, "model"), "config").update(vocab_size=999)),
        "config.vocab_size = 260, but .* says 999",
    ),
    ("other scheme", put("name2", "x", "scheme"), 'scheme.name2 = null, but .* says "x"'),
    ("library truncated", cut("model.so", 1000), "has 1000 bytes, but bundle.json says"),
    ("library cut", cut_and_reseal("model.so", 20_000), "not a whole shared library"),
    ("library empty", cut_and_reseal("model.so", 0), "not a whole shared library"),
    (
        "library of ELF and noise",
        write("model.so", b"\x7fELF" + bytes(range(256)) * 40),
        "not a whole shared",
    ),
    ("library with a far segment", elf_with_far_segment, "not a whole shared library"),
    ("library of another kind", foreign_library, "a shared library, but not one of a model"),
    ("weights empty", cut_and_reseal(WEIGHTS, 0), "not a whole weights file: it is truncated"),
    ("weights data cut", cut_and_reseal(WEIGHTS, 2000), "'table' ends after the end of the file"),
    (
        "weights of another shape",
        header(table={"dtype": "F32", "shape": [520, 2], "data_offsets": [0, 4160]}),
        r"'table' is float32 \[520, 2\], but the library takes float32 \[260, 4\]",
    ),
    (
        "weights without the tensor",
        header(table={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, other={}),
        "in its header, 'other.dtype' is missing",
    ),
    ("weights of another model", other_weights, "have signature abababababab, but bundle.json is for"),
    ("library of another model", other_model, "takes weights of signature .*, but .* abababababab"),
    (
        "library of another version",
        metadata_text(b"mlcbuild-library/2", b"mlcbuild-library/9"),
        "'mlcbuild-library/9'",
    ),
    (
        "library with broken metadata",
        metadata_text(b'{"format": "mlc', b'["format": "mlc'),
        "metadata is not usable",
    ),
    ("no tokenizer", no_tokenizer, "neither tokenizer.json nor tokenizer.model"),
    ("tokenizer of noise", write("tokenizer.json", b"{}"), "not a tokenizer that can be read"),
    (
        "tokenizer config of noise",
        write("tokenizer_config.json", b"{"),
        "tokenizer_config.json: not valid JSON",
    ),
]
"""Kinds of damage that only a process which loads the library detects, or that could end it by a signal."""


def cases(damages: list[Damage]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("damage", "message"), [case[1:] for case in damages], ids=[case[0] for case in damages]
    )


@cases(READ)
def test_a_damaged_bundle_is_not_read(toy_copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(toy_copy)
    with pytest.raises(BundleError, match=message) as caught:
        bundle.read(toy_copy)
    assert "\n" not in str(caught.value)


@cases(LOADED)
def test_a_damaged_bundle_is_refused(toy_copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(toy_copy)
    done = shared.run("-m", "mlcbuild_runtime", str(toy_copy), "--port", "0")
    assert done.returncode == 1, done
    assert re.fullmatch(r"mlcbuild-serve: [^\n]+\n", done.stderr), done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert done.stdout == ""


def test_no_such_directory_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist, but a bundle is a directory"):
        bundle.read(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="is a file, but a bundle is a directory"):
        bundle.read(tmp_path / "file")


def test_a_changed_byte_of_weights_is_found_by_the_full_check(toy_copy: Path) -> None:
    flip(WEIGHTS, 3000)(toy_copy)
    assert bundle.read(toy_copy).name == "toy-q0f32-host"
    with pytest.raises(BundleError, match="has BLAKE3"):
        bundle.check(toy_copy)


def test_the_manifest_survives_writing_and_reading(toy_bundle: Path) -> None:
    manifest = bundle.read(toy_bundle)
    assert bundle.parse(json.loads(manifest.to_bytes())) == manifest
    assert manifest.to_bytes() == (toy_bundle / "bundle.json").read_bytes()


def test_the_weights_header_gives_places(toy_bundle: Path) -> None:
    (tensor,) = weights.read_header(toy_bundle / WEIGHTS).tensors
    assert (tensor.name, tensor.dtype, tensor.shape) == ("table", "float32", (260, 4))
    assert tensor.start % 64 == 0
