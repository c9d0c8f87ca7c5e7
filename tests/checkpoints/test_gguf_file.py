"""Tests of reading headers of GGUF files: values, files in several parts, alignment, and files that are
damaged on purpose."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlcbuild.checkpoints.gguf_config import read_config
from mlcbuild.checkpoints.gguf_file import read_gguf
from mlcbuild.checkpoints.gguf_tensors import read_tensors
from mlcbuild.checkpoints.row_reader import ParameterSource, Rows
from mlcbuild.errors import CheckpointError
from mlcbuild.models import Param
from tests.conftest import ROOT
from tests.gguf_files import write_gguf

GOLDEN = ROOT / "tests" / "golden"


def written(path: Path, alignment: int = 32) -> Path:
    """Writes a GGUF file with a metadata value of every type and two tensors, and returns its path."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_custom_alignment(alignment)
    for kind, value in {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "int32": -70000}.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_uint64("a.uint64", 1 << 60)
    writer.add_int64("a.int64", -(1 << 60))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "größer 🙂")
    writer.add_array("a.strings", ["x", "", "▁y"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("one", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("two", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_values_and_places(tmp_path: Path, alignment: int) -> None:
    path = written(tmp_path / "m.gguf", alignment)
    model_file = read_gguf(path)
    values = {key.removeprefix("a."): value for key, value in model_file.metadata.items()}
    assert values.pop("general.architecture") == "llama"
    numbers = values.pop("numbers")
    assert isinstance(numbers, np.ndarray) and numbers.tolist() == [1, 2, 3]
    assert values == {
        "general.alignment": alignment,
        "uint8": 200,
        "int8": -3,
        "uint16": 60000,
        "int16": -300,
        "int32": -70000,
        "uint64": 1 << 60,
        "int64": -(1 << 60),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "größer 🙂",
        "strings": ["x", "", "▁y"],
    }
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        mine = model_file.tensors[tensor.name]
        assert (mine.start, mine.size) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


def test_parts_of_a_split_file(tmp_path: Path) -> None:
    for i in (1, 2):
        writer = gguf.GGUFWriter(str(tmp_path / f"m-0000{i}-of-00002.gguf"), "llama")
        writer.add_uint16("split.tensors.count", 2)
        writer.add_tensor(f"t{i}", np.full((2, 2), i, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for i in (1, 2):
        model_file = read_gguf(tmp_path / f"m-0000{i}-of-00002.gguf")
        assert {name: t.path.name for name, t in model_file.tensors.items()} == {
            "t1": "m-00001-of-00002.gguf",
            "t2": "m-00002-of-00002.gguf",
        }
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"this part of .* is missing; fetch all 2 parts"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_tensor_in_two_parts_and_a_wrong_count(tmp_path: Path) -> None:
    for i in (1, 2):
        written(tmp_path / f"m-0000{i}-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"tensor 'one' is also in m-00001-of-00002\.gguf"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "n.gguf"), "llama")
    writer.add_uint16("split.tensors.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"must hold 3 tensors \(split.tensors.count\), found 0"):
        read_gguf(tmp_path / "n.gguf")


HEADERS = {
    "not a file of this kind": (b"GGML" + bytes(20), "must begin with 'GGUF'"),
    "empty": (b"", "it ends within the magic number"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(16), "is a version 1 GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "is a big-endian GGUF file"),
    "a later version": (b"GGUF" + struct.pack("<I", 9) + bytes(16), "its version must be 2 or 3, found 9"),
    "many tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        "tensors and 0 metadata entries do not fit",
    ),
    "a long key": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 40) + bytes(40),
        "a metadata key cannot have 1099511627776 bytes",
    ),
    "a key that is no text": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xfe" + bytes(20),
        "a metadata key is not UTF-8 text",
    ),
    "a type that does not exist": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77) + bytes(20),
        "metadata key 'k' has a type that does not exist (77)",
    ),
    "an array of arrays": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1) + bytes(20),
        "is an array of a type that cannot be read (9)",
    ),
    "a long array": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 50) + bytes(20),
        "metadata key 'k' cannot hold",
    ),
    "an alignment that is true": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 17) + b"general.alignment" + struct.pack("<IB", 7, 1),
        "general.alignment must be a power of two, found True",
    ),
    "many strings": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 50) + bytes(20),
        "metadata key 'k' cannot hold",
    ),
}


@pytest.mark.parametrize("name", list(HEADERS))
def test_headers_that_are_wrong(name: str, tmp_path: Path) -> None:
    data, sentence = HEADERS[name]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(tmp_path / "m.gguf")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("absent.gguf", "pipe.gguf", "."):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_gguf(tmp_path / name)


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize("read", [read_gguf, read_config, read_tensors])
def test_names_in_messages_are_short_and_on_one_line(read: Callable[[Path], object], tmp_path: Path) -> None:
    odd = "\x1b[31m\n" + "k" * 60_000
    text = struct.pack("<Q", len(odd)) + odd.encode()
    architecture = entry("general.architecture", 8, struct.pack("<Q", 5) + b"llama")
    description = text + struct.pack("<IQIQ", 1, 32, 77, 0)
    for number, (tensors, entries) in enumerate(
        [
            (b"", [entry(odd, 77, bytes(8))]),
            (b"", [entry(odd, 9, struct.pack("<IQ", 8, 1 << 40))]),
            (b"", [entry("general.alignment", 8, text)]),
            (b"", [entry("general.architecture", 8, text), entry("a", 4, bytes(4))]),
            (b"", [architecture, entry("llama." + odd, 4, bytes(4))]),
            (b"", [architecture, *(entry(f"llama.{i}", 4, bytes(4)) for i in range(1000))]),
            (description, [architecture]),
        ]
    ):
        path = tmp_path / f"{number}.gguf"
        counts = struct.pack("<IQQ", 3, bool(tensors), len(entries))
        path.write_bytes(b"GGUF" + counts + b"".join(entries) + tensors + bytes(64))
        try:
            read(path)
        except CheckpointError as error:
            lines = str(error).split("\n")
            assert len(lines) < 70 and all(line.isprintable() and len(line) < 600 for line in lines), number


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(st.data())
def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path, data: st.DataObject) -> None:
    """Checks that a damaged GGUF file is refused in one sentence, or is read if the damage is in a value on
    which nothing depends."""
    path = tmp_path / "m.gguf"
    if not (tmp_path / "whole").exists():
        write_gguf(GOLDEN / "llama-llama3-gqa", tmp_path / "whole")
    whole = bytearray((tmp_path / "whole").read_bytes())
    header = 2600
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header))
        width = data.draw(st.sampled_from([1, 4, 8]))
        whole[place : place + width] = data.draw(st.binary(min_size=width, max_size=width))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole))) :]
    path.write_bytes(whole)
    for read in (read_gguf, read_config, read_tensors):
        try:
            read(path)
        except CheckpointError as error:
            assert str(error).startswith(str(tmp_path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.integers(0, 59), st.integers(1, 60), st.sampled_from(["F32", "F16", "Q8_0", "Q4_0", "Q6_K"]))
def test_any_rows_of_a_tensor_in_pairs(tmp_path: Path, start: int, count: int, kind: str) -> None:
    """Checks that rows which llama.cpp stores in another order are returned in transformers' order, for
    ranges that begin and end within a head."""
    path, count = tmp_path / f"{kind}.gguf", min(count, 60 - start)
    heads, dim, columns = 6, 10, 256
    values = np.random.default_rng(1).standard_normal((heads * dim, columns)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    stored = (
        values if kind == "F32" else values.astype(np.float16) if kind == "F16" else _quantized(values, kind)
    )
    if not path.exists():
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_uint32("llama.attention.head_count", heads)
        writer.add_tensor("blk.0.attn_q.weight", stored, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    plain = stored.astype(np.float32) if stored.dtype != np.uint8 else gguf.quants.dequantize(stored, number)
    ordered = plain.reshape(heads, dim // 2, 2, columns).swapaxes(1, 2).reshape(heads * dim, columns)
    (tensor,) = read_tensors(path).values()
    source = ParameterSource(Param("layers.0.attn.qkv.weight", tensor.shape), (tensor,))
    with Rows() as rows:
        np.testing.assert_array_equal(rows.wide(source, start, start + count), ordered[start : start + count])


def test_a_quantized_vector_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_tensor("output_norm.weight", np.zeros(34, np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError) as caught:
        read_tensors(path)
    assert str(caught.value) == (
        f"{path}: tensor 'output_norm.weight' is a vector of the type Q8_0; vectors must not be quantized: "
        "use another file, or convert the model again"
    )


def _quantized(values: np.ndarray, kind: str) -> np.ndarray:
    number = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(values, number)
    except NotImplementedError:  # the package only reads some: any bytes are blocks of them
        block, size = gguf.GGML_QUANT_SIZES[number]
        return np.random.default_rng(2).integers(
            0, 60, (len(values), values.shape[1] // block * size), np.uint8
        )
