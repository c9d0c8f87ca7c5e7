"""Tests of finding the weights files of a checkpoint, with or without an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format.safetensors import Tensor

from mlcbuild.checkpoints.shard_index import INDEX, SINGLE, index_faults, read_index, weights_files
from mlcbuild.errors import CheckpointError

TWO = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}


def index(root: Path, document: Any) -> Path:
    (root / INDEX).write_text(document if isinstance(document, str) else json.dumps(document))
    return root / INDEX


def test_a_single_file_goes_before_an_index_and_an_index_before_others(tmp_path: Path) -> None:
    for name in ("x.safetensors", "adapter_model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert weights_files(tmp_path) == (["x.safetensors"], None)
    index(tmp_path, {"weight_map": TWO})
    assert weights_files(tmp_path) == (["model-1.safetensors", "model-2.safetensors"], TWO)
    (tmp_path / SINGLE).write_bytes(b"")
    assert weights_files(tmp_path) == ([SINGLE], None)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="and no other weights; fetch the checkpoint"):
        weights_files(tmp_path)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ([], "must hold a 'weight_map'"),
        ({"weight_map": {}}, "must hold a 'weight_map'"),
        ({"weight_map": {"a": 1}}, "puts tensor 'a' in 1; it must name a .safetensors file"),
        ({"weight_map": {"a": "../x.safetensors"}}, "beside itself"),
        ({"weight_map": {"a": "x.bin"}}, "beside itself"),
    ],
)
def test_an_index_that_is_refused(tmp_path: Path, document: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_index(index(tmp_path, document), ".safetensors")


def test_an_index_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_index(tmp_path / INDEX, ".safetensors")


def tensor(name: str, file: str) -> Tensor:
    return Tensor(name, "F32", (1,), Path(file), 0, 4)


def test_an_index_and_its_files_agree_in_both_directions(tmp_path: Path) -> None:
    held = {name: tensor(name, file) for name, file in TWO.items()}
    path = tmp_path / INDEX
    assert index_faults(path, TWO, held, lambda name: None) == []
    assert index_faults(path, None, {}, lambda name: None) == []
    moved = {**held, "b": tensor("b", "model-1.safetensors")}
    (fault,) = index_faults(path, TWO, moved, lambda name: None)
    assert "puts tensor 'b' in model-2.safetensors, which does not hold it" in fault
    (fault,) = index_faults(path, {**TWO, "d": "model-1.safetensors"}, held, lambda name: None)
    assert "puts tensor 'd'" in fault
    # The converter of safetensors lists tied tensors that it does not store.
    tied = {**TWO, "d": "model-1.safetensors"}
    assert index_faults(path, tied, held, lambda name: "not needed" if name == "d" else None) == []
    more = {**held, "extra": tensor("extra", "model-1.safetensors")}
    (fault,) = index_faults(path, TWO, more, lambda name: None)
    assert "does not list tensor 'extra', which model-1.safetensors holds" in fault
    assert index_faults(path, TWO, more, lambda name: "not needed") == []
