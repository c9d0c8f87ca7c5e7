"""Tests of dividing the weights of a bundle among several files."""

from __future__ import annotations

import json

from mlcbuild.checkpoints.shards import lay_out
from mlcbuild.quant import StoredTensor


def tensors(*sizes: int) -> list[StoredTensor]:
    return [StoredTensor(f"t{i}", (size,), "uint8", "plain") for i, size in enumerate(sizes)]


def test_files_are_filled_in_order_and_no_tensor_is_divided() -> None:
    shards = lay_out(tensors(60, 40, 1, 250, 30, 30), {"format": "x"}, 100)
    assert [list(shard.file.starts) for shard in shards] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert [shard.name for shard in shards] == [f"weights-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    for shard in shards:
        header = json.loads(shard.file.header[8:])
        assert header.pop("__metadata__") == {"format": "x"}
        assert set(header) == set(shard.file.starts)
        assert shard.file.size >= len(shard.file.header) + 1


def test_no_tensors_make_one_file() -> None:
    (shard,) = lay_out([], {}, 100)
    assert shard.name == "weights-00001-of-00001.safetensors" and not shard.file.starts
