"""Tests of the headers of safetensors files: which are refused, and that another reader accepts those that
are written."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlcbuild_format import safetensors
from mlcbuild_format.safetensors import HeaderError
from safetensors import safe_open

U8: dict[str, Any] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def save(path: Path, header: bytes, data: int = 4) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))
    return path


FAULTS: dict[str, tuple[object, str]] = {
    "no object": ([], "the document must be an object, found"),
    "an entry that is no object": ({"a": 3}, "'a' must be an object, found 3"),
    "a missing field": ({"a": {"dtype": "U8"}}, "'a.shape' is missing"),
    "a field more": ({"a": {**U8, "order": "C"}}, "unknown field 'a.order'"),
    "an unknown dtype": ({"a": {**U8, "dtype": "Q4"}}, "'a.dtype' must be one of .*, found 'Q4'"),
    "a negative size": ({"a": {**U8, "shape": [-4]}}, "'a.shape' must be a list of integers from 0"),
    "a size that is a truth value": ({"a": {**U8, "shape": [True]}}, "'a.shape' must be a list of integers"),
    "many dimensions": ({"a": {**U8, "shape": [1] * 9}}, "'a.shape' has more than 8 dimensions"),
    "a product beyond 64 bits": ({"a": {**U8, "shape": [2**52, 2**52]}}, "'a.data_offsets' do not hold"),
    "one offset": ({"a": {**U8, "data_offsets": [4]}}, "'a.data_offsets' do not hold"),
    "offsets of another size": ({"a": {**U8, "data_offsets": [0, 3]}}, "'a.data_offsets' do not hold"),
    "half a byte": ({"a": {**U8, "dtype": "F4", "shape": [1]}}, "'a.data_offsets' do not hold"),
    "a gap": ({"a": {**U8, "shape": [1], "data_offsets": [3, 4]}}, "3 bytes of no tensor in front of 'a'"),
    "an overlap": ({"a": U8, "b": U8}, "'b' begins before the end of the tensor in front of it"),
    "data behind the end": ({"a": {**U8, "shape": [8], "data_offsets": [0, 8]}}, "'a' ends after the end"),
    "bytes behind": ({"a": {**U8, "shape": [1], "data_offsets": [0, 1]}}, "3 bytes behind the last tensor"),
    "metadata of numbers": ({"__metadata__": {"step": 3}, "a": U8}, "must hold strings, found 3 at 'step'"),
    "metadata of a list": ({"__metadata__": [], "a": U8}, "'__metadata__' must be an object"),
    "a name that moves the cursor": ({"\x1b[2J": 3}, r"'\\x1b\[2J' must be an object"),
}


@pytest.mark.parametrize(("document", "message"), FAULTS.values(), ids=FAULTS)
def test_a_header_that_breaks_a_rule_is_refused(document: object, message: str, tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", json.dumps(document).encode())
    with pytest.raises(HeaderError, match=f"^in its header, .*{message}") as caught:
        safetensors.read_header(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "its header is not valid JSON"),
        (b'{"a": 1, "a": 2}', r"not valid JSON \(the key 'a' is there twice\)"),
        (b"[" * 100_000, r"not valid JSON \(it is nested too deeply"),
        (b'{"a": 1e999}', "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
    ],
)
def test_a_header_that_is_no_json_is_refused(header: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=message):
        safetensors.read_header(save(tmp_path / "a.safetensors", header))


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_truncated_file_is_refused(size: int, tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", json.dumps({"a": U8}).encode())
    os.truncate(path, size)
    with pytest.raises(HeaderError, match=f"it is truncated or damaged: {size} bytes do not hold the header"):
        safetensors.read_header(path)


def test_a_large_header_is_not_read(tmp_path: Path) -> None:
    """Checks that a header which is too large is refused without being read. The file is sparse and has the
    size that its header's length implies."""
    path, size = tmp_path / "a.safetensors", safetensors.MAX_HEADER + 1
    path.write_bytes(size.to_bytes(8, "little"))
    os.truncate(path, size + 8)
    with pytest.raises(HeaderError, match=f"its header has {size} bytes, more than {size - 1}"):
        safetensors.read_header(path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a named pipe, not a regular file"):
        safetensors.read_header(tmp_path / "pipe")


@dataclass(frozen=True)
class Planned:
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def test_another_reader_agrees_with_what_is_written(tmp_path: Path) -> None:
    planned = [
        Planned("odd", (3,), "uint8"),
        *(Planned(f"of {dtype}", (16, 8), dtype) for dtype in safetensors.NUMPY.values()),
        Planned("scalar", (), "float32"),
        Planned("empty", (0, 5), "float16"),
    ]
    layout = safetensors.lay_out(planned, {"format": "x", "é": "\n"})
    path = tmp_path / "a.safetensors"
    path.write_bytes(layout.header + bytes(range(256)) * 32)
    os.truncate(path, layout.size)
    header = safetensors.read_header(path)
    assert header.metadata == {"format": "x", "é": "\n"}
    assert {tensor.name: tensor.start for tensor in header.tensors} == layout.starts
    assert all(tensor.start % safetensors.ALIGNMENT == 0 for tensor in header.tensors if tensor.size == 512)
    data = path.read_bytes()
    with safe_open(path, "numpy") as other:
        assert other.metadata() == header.metadata
        for tensor in header.tensors:
            array = other.get_tensor(tensor.name)
            assert (array.shape, array.dtype) == (tensor.shape, safetensors.NUMPY[tensor.dtype])
            assert array.tobytes() == data[tensor.start : tensor.start + tensor.size]


def test_the_widths_are_those_of_the_other_reader(tmp_path: Path) -> None:
    for dtype, bits in safetensors.BITS.items():
        entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}
        path = save(tmp_path / "a.safetensors", json.dumps({"a": entry}).encode(), data=bits)
        with safe_open(path, "numpy") as other:
            assert other.get_slice("a").get_dtype() == dtype
        (tensor,) = safetensors.read_header(path).tensors
        assert (tensor.dtype, tensor.size) == (dtype, bits)
