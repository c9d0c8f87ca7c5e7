"""Tests of checkpoints in PyTorch's format: a file written by torch.save, checkpoints of one and of several
files, and files that are refused."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from mlcbuild_format.safetensors import Tensor

from mlcbuild import pipeline, recipe
from mlcbuild.checkpoints import exact_weights, torch_files, zip_places
from mlcbuild.checkpoints.checkpoint_kinds import PYTORCH, SAFETENSORS, kind_of, kind_of_files
from mlcbuild.checkpoints.fetch import local_files
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import CheckpointError, InputError
from mlcbuild.models import parsing
from tests.checkpoint_files import CONFIG, HF, content, single, tensors, write
from tests.conftest import ROOT
from tests.schemes import SCHEMES
from tests.torch_writer import EMPTY, number, pickled, strides, tensor, text, torch_file, zipped

GOLDEN = ROOT / "tests" / "golden" / "torch"


def stored(item: Tensor) -> bytes:
    return item.path.read_bytes()[item.start : item.start + item.size]


def test_a_file_of_torch_save_has_the_tensors_that_safetensors_has() -> None:
    by_name = {item.name: item for item in torch_files.read_file(GOLDEN / "saved.bin")}
    other = {item.name: item for item in read_header(GOLDEN / "saved.safetensors").tensors}
    assert by_name.keys() == other.keys()
    for name, item in by_name.items():
        assert (item.dtype, item.shape, stored(item)) == (
            other[name].dtype,
            other[name].shape,
            stored(other[name]),
        )


def sharded(root: Path) -> Path:
    root.mkdir()
    whole = tensors("F16")
    names = list(whole)
    place = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(place.values()):
        (root / file).write_bytes(torch_file({name: whole[name] for name in names if place[name] == file}))
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": place}))
    return root


def one_file(root: Path, data: bytes | None = None) -> Path:
    root.mkdir()
    (root / "pytorch_model.bin").write_bytes(torch_file(tensors("F16")) if data is None else data)
    return root


@pytest.mark.parametrize("make", [one_file, sharded])
def test_weights_are_those_of_the_same_safetensors(make: object, tmp_path: Path) -> None:
    expected = content(write(single(tmp_path / "a", tensors("F16")), tmp_path / "out-a", SCHEMES["q4f16_1"]))
    root = (one_file if make is one_file else sharded)(tmp_path / "b")
    assert content(write(root, tmp_path / "out-b", SCHEMES["q4f16_1"])) == expected
    (root / "config.json").write_text(json.dumps(HF))
    (root / "training_args.bin").write_bytes(b"a pickle that nothing reads")
    assert kind_of(root) is PYTORCH is kind_of_files(local_files(root))
    assert "training_args.bin" not in local_files(root)
    single(root, tensors("F16"))
    assert kind_of(root) is SAFETENSORS is kind_of_files(local_files(root))


def test_a_truncated_file_is_found_before_any_step(tmp_path: Path) -> None:
    root = one_file(tmp_path / "m", torch_file(tensors("F16"))[:-100])
    (root / "config.json").write_text(json.dumps(HF))
    (root / "tokenizer.json").write_text("{}")
    text = "version: 1\nmodels: {m: ./m}\nquantizations: [q4f16_1]\ntargets: [x86-64-v3]\n"
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match=r"pytorch_model.bin: it has no end record, so it is truncated"):
        pipeline.build(recipe.load(tmp_path / "recipe.yaml"), Lock({}))


def test_zip64_records_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that zip64 records are read. PyTorch writes them for files above 4 GB; here Python's zipfile
    writes them from 20 bytes on."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 20)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    root = one_file(tmp_path / "a")
    assert zip_places._END64 in (root / "pytorch_model.bin").read_bytes()
    read = exact_weights.checkpoint(root, CONFIG, parsing.tensor_names(CONFIG))
    other = single(tmp_path / "b", tensors("F16"))
    for name, values in exact_weights.checkpoint(other, CONFIG, parsing.tensor_names(CONFIG)).items():
        np.testing.assert_array_equal(read[name], values)


ONE = {"a": ("F32", np.ones((2, 3), np.float32))}


def with_pickle(pickle: bytes, members: Mapping[str, bytes] | None = None) -> bytes:
    return zipped(
        {"archive/data.pkl": pickle, **({"archive/data/0": bytes(24)} if members is None else members)}
    )


def entry(code: bytes) -> bytes:
    return with_pickle(pickled({"a": code}))


def call(module: str, name: str, arguments: bytes = b")") -> bytes:
    return f"c{module}\n{name}\n".encode() + arguments + b"R"


PLAIN = tensor("F32", "0", (2, 3), (3, 1))
FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"it has no end record, so it is truncated or no zip file"),
    "old": (
        torch_files._OLD + bytes(99),
        r"it was written by PyTorch before 1\.6, in a format that is not rea",
    ),
    "truncated": (torch_file(ONE)[:-30], r"it has no end record, so it is truncated"),
    "cut in front": (torch_file(ONE)[200:], r"(header of its member 'archive/data.pkl' is|record contra)"),
    "compressed": (
        zipped({"archive/data.pkl": pickled({}) * 9}, zipfile.ZIP_DEFLATED),
        r"its member 'archive/data.pkl' is compressed or encrypted",
    ),
    "no pickle": (zipped({"archive/data/0": b""}), r"it must have one member data.pkl, as .* found 0"),
    "two pickles": (zipped({"a/data.pkl": b"", "b/data.pkl": b""}), r"one member data.pkl, .* found 2"),
    "big-endian": (
        zipped({"archive/data.pkl": pickled({}), "archive/byteorder": b"big"}),
        r"its numbers are big-endian",
    ),
    "no storage": (with_pickle(pickled({"a": PLAIN}), {}), r"it lacks its member 'archive/data/0'"),
    "calls": (entry(call("os", "system", text("rm") + b"\x85")), r"its pickle names 'os.system', which bel"),
    "calls in protocol 4": (
        entry(text("builtins") + text("eval") + b"\x93" + text("1") + b"\x85R"),
        r"its pickle names 'builtins.eval', which belongs to no tensor and is not executed",
    ),
    "instance": (entry(b"(ios\nsystem\n"), r"has the opcode b'i', which no tensors need"),
    "reduces a class": (entry(call("torch", "FloatStorage")), r"calls a function with other arguments than"),
    "arguments": (entry(call("collections", "OrderedDict", number(1) + b"\x85")), r"with other arguments"),
    "attributes": (entry(PLAIN + b"}b"), r"sets attributes of something other than a mapping"),
    "an integer": (entry(number(1)), r"its entry 'a' is no tensor"),
    "no text": (with_pickle(b"\x80\x02}" + number(1) + PLAIN + b"s."), r"has an entry whose name is no text"),
    "a list": (with_pickle(b"\x80\x02]."), r"it holds no mapping of names to tensors"),
    "cut pickle": (with_pickle(pickled({"a": PLAIN})[:-1]), r"its pickle is truncated"),
    "empty stack": (with_pickle(b"\x80\x02R."), r"its pickle is damaged"),
    "endless": (with_pickle(b"\x80\x02" + b"N" * 1_000_001), r"its pickle has more than 1000000 opcodes"),
    "storage": (entry(text("x") + b"Q"), r"refers to something other than a storage"),
    "view": (entry(tensor("F32", "0", (3, 2), (1, 3))), r"its tensor 'a' is a view whose rows are not s"),
    "beyond": (entry(tensor("F32", "0", (2, 3), (3, 1), 1)), r"tensor 'a' ends after the end of its storage"),
    "negative": (entry(tensor("F32", "0", (-2, 3), (3, 1))), r"a tensor with an impossible shape"),
    "huge": (entry(tensor("F32", "0", (1 << 40, 1 << 40), (1 << 40, 1))), r"ends after the end of its stor"),
    "dimensions": (entry(tensor("F32", "0", (1,) * 9, strides((1,) * 9))), r"with an impossible shape"),
    "metadata": (entry(EMPTY + b"}b"), r"its entry 'a' is no tensor"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_other_files_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    data, message = FAULTS[name]
    root = one_file(tmp_path / "m", data)
    with pytest.raises(CheckpointError, match=message) as error:
        torch_files.read_tensors(root)
    assert "\n" not in str(error.value)


def test_names_in_two_files_and_a_wrong_index(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m")
    index = root / "pytorch_model.bin.index.json"
    place = json.loads(index.read_text())["weight_map"]
    first = next(iter(place))
    (root / "pytorch_model-00002-of-00002.bin").write_bytes(torch_file({first: tensors("F16")[first]}))
    with pytest.raises(CheckpointError, match=rf"tensor '{first}' is also in pytorch_model-00001"):
        torch_files.read_tensors(root)
    index.write_text(json.dumps({"weight_map": {"x": "pytorch_model-00001-of-00002.bin"}}))
    with pytest.raises(CheckpointError, match=r"it puts tensor 'x' in .*, which does not hold it; fetch the"):
        torch_files.read_tensors(root)
    index.write_text(json.dumps({"weight_map": {"x": "gone.bin"}}))
    with pytest.raises(CheckpointError, match=r"gone.bin: it is not there; fetch the whole checkpoint"):
        torch_files.read_tensors(root)


def test_a_directory_header_that_lies_about_sizes(tmp_path: Path) -> None:
    data = bytearray(torch_file(ONE))
    at = data.rfind(b"PK\5\6")
    struct.pack_into("<I", data, at + 12, 1 << 30)
    with pytest.raises(CheckpointError, match=r"its end record contradicts the file"):
        torch_files.read_tensors(one_file(tmp_path / "m", bytes(data)))
