"""Tests of reading checkpoints: which tensors are used, and the messages about faulty files and tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mlcbuild import models
from mlcbuild.checkpoints import exact_weights, headers
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.errors import CheckpointError
from mlcbuild.models import parsing
from tests.checkpoint_files import (
    CONFIG,
    TIED,
    Entry,
    content,
    entry,
    save,
    sharded,
    single,
    tensors,
    wide,
    write,
)
from tests.schemes import SCHEMES

NORM = "model.norm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("code", ["F32", "F16", "BF16"])
def test_checkpoint_gives_the_fused_parameters_exactly(code: str, tmp_path: Path) -> None:
    original = tensors(code)
    root, names = single(tmp_path / "hf", original), parsing.tensor_names(CONFIG)
    weights = exact_weights.checkpoint(root, CONFIG, names)
    assert list(weights) == [param.name for param in models.parameters(CONFIG)]
    for name, pieces in names.sources.items():
        expected = np.concatenate([wide(original[piece.tensor]) for piece in pieces])
        assert weights[name].dtype == np.float32
        assert np.array_equal(weights[name], expected)
    with pytest.raises(KeyError):
        weights["model.norm.weight"]


def test_two_copies_of_a_tied_matrix(tmp_path: Path) -> None:
    tied = tensors(config=TIED)
    expected = content(write(single(tmp_path / "a", tied), tmp_path / "out-a", SCHEMES["q4f16_1"], TIED))
    embedding = tied["model.embed_tokens.weight"]
    wider = "lm_head.weight", entry(wide(embedding), "F32")
    renamed = {"lm_head.weight": embedding, **{k: v for k, v in tied.items() if "embed" not in k}}
    for i, same in enumerate(({**tied, "lm_head.weight": embedding}, {**tied, wider[0]: wider[1]}, renamed)):
        root = single(tmp_path / f"b{i}", same)
        assert content(write(root, tmp_path / f"out-b{i}", SCHEMES["q4f16_1"], TIED)) == expected
    other = embedding[1].copy()
    other[50, 39] += 1
    with pytest.raises(
        CheckpointError, match=r"set tie_word_embeddings to false in config.json if 'lm_head\.weight'"
    ):
        locate(
            single(tmp_path / "c", {**tied, "lm_head.weight": ("BF16", other)}),
            TIED,
            parsing.tensor_names(TIED),
        )


def test_which_files_are_read(tmp_path: Path) -> None:
    root = sharded(tmp_path / "hf", tensors())
    save(root / "model-00004-of-00003.safetensors", {"stray": entry(ONES, "F16")})
    assert (
        locate(root, CONFIG, parsing.tensor_names(CONFIG))[0].pieces[0].path.name
        == "model-00001-of-00003.safetensors"
    )
    single(root, tensors())
    assert {
        piece.path.name
        for source in locate(root, CONFIG, parsing.tensor_names(CONFIG))
        for piece in source.pieces
    } == {"model.safetensors"}
    other = tmp_path / "other"
    other.mkdir()
    (root / "model.safetensors").rename(other / "weights.safetensors")
    save(other / "adapter_model.safetensors", {"lora": entry(ONES, "F16")})
    assert locate(other, CONFIG, parsing.tensor_names(CONFIG))[0].pieces[0].path.name == "weights.safetensors"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read \(it is a directory, not a regular"):
        headers.read_header(tmp_path)
    root = single(tmp_path / "hf", tensors())
    weights = exact_weights.checkpoint(root, CONFIG, parsing.tensor_names(CONFIG))
    (root / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file or directory\); run again"):
        weights["norm.weight"]


def test_rotary_tables_are_left_out(tmp_path: Path) -> None:
    old = tensors()
    old["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", np.ones(4, np.float32))
    expected = content(write(single(tmp_path / "a", tensors()), tmp_path / "out-a", SCHEMES["q0f16"]))
    assert content(write(single(tmp_path / "b", old), tmp_path / "out-b", SCHEMES["q0f16"])) == expected


def emptied(root: Path) -> Path:
    for path in root.iterdir():
        path.unlink()
    return root


def edited(path: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def indexed(root: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = root / "model.safetensors.index.json"
    document = json.loads(path.read_bytes())
    change(document["weight_map"])
    path.write_text(json.dumps(document))


def replaced(root: Path, name: str, stored: Entry | None, *, extra: str | None = None) -> None:
    """Writes the usual test checkpoint, a single safetensors file, with one change: the tensor `name` is
    replaced by `stored`, or removed if that is None. If `extra` is a name, the tensor is instead copied to
    that name."""
    actual = tensors()
    if extra is not None:
        actual[extra] = actual[name]
    elif stored is None:
        del actual[name]
    else:
        actual[name] = stored
    single(root, actual)


def save_raw(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


ONES = np.ones((40, 72), np.float32)
DAMAGED = "is truncated, damaged or not a safetensors file"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (
        emptied,
        r"it has no model.safetensors, no model.safetensors.index.json and no other weights; fetch the",
    ),
    "only pickles": (
        lambda root: (emptied(root) / "pytorch_model.bin").write_bytes(b""),
        r"pytorch_model.bin: it has no end record, so it is truncated or no zip file; fetch the file again",
    ),
    "missing tensor": (
        lambda root: replaced(root, DOWN, None),
        rf"tensor '{DOWN}' is missing \(layers.0.mlp.down.weight needs it\); fetch the whole checkpoint",
    ),
    "unknown tensor": (
        lambda root: replaced(root, DOWN, None, extra="model.extra.weight"),
        r"tensor 'model.extra.weight' belongs to no parameter of family 'llama'",
    ),
    "wrong shape": (
        lambda root: replaced(root, DOWN, ("F32", ONES.T.copy())),
        rf"tensor '{DOWN}' must have the shape \[40, 72\], as config.json says; found \[72, 40\]",
    ),
    "wrong shape of a vector": (
        lambda root: replaced(root, NORM, ("F32", ONES[:1, :40].copy())),
        rf"tensor '{NORM}' must have the shape \[40\], as config.json says; found \[1, 40\]",
    ),
    "integers": (
        lambda root: replaced(root, DOWN, ("I64", ONES.astype(np.int64))),
        rf"tensor '{DOWN}' is I64; weights are F32, F16, BF16, F64, I8, .*: use the original, unqu",
    ),
    "unknown dtype": (
        lambda root: replaced(root, DOWN, ("Q4", ONES)),
        rf"model.safetensors: {DAMAGED} \(\d+ bytes; .*'{DOWN}.dtype' must be one of .*\); fetch the",
    ),
    "missing file": (
        lambda root: (root / SHARD).unlink(),
        rf"it names '{SHARD}', which is not there; fetch the whole checkpoint",
    ),
    "truncated file": (
        lambda root: os.truncate(root / SHARD, 5000),
        rf"{SHARD}: {DAMAGED} \(5000 bytes; .*\); fetch the file again",
    ),
    "truncated header": (lambda root: os.truncate(root / SHARD, 100), rf"{SHARD}: {DAMAGED} \(100 bytes; "),
    "longer file": (
        lambda root: os.truncate(root / SHARD, (root / SHARD).stat().st_size + 3),
        rf"{SHARD}: {DAMAGED} \(\d+ bytes; ",
    ),
    "empty file": (
        lambda root: os.truncate(root / SHARD, 0),
        rf"{SHARD}: {DAMAGED} \(0 bytes; ",
    ),
    "git lfs": (
        lambda root: (root / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0"),
        rf"{SHARD}: is a Git LFS pointer, not the weights; run 'git lfs pull'",
    ),
    "html": (
        lambda root: (root / SHARD).write_text("<html><body>429 Too Many Requests</body></html>"),
        rf"{SHARD}: {DAMAGED} \(47 bytes; ",
    ),
    "broken header": (
        lambda root: edited(root / SHARD, b'"dtype"', b'"dtype '),
        rf"{SHARD}: {DAMAGED} \(\d+ bytes; .*JSON.*\); fetch",
    ),
    "field": (lambda root: edited(root / SHARD, b'"dtype"', b'"dtypo"'), rf"{SHARD}: {DAMAGED}"),
    "bytes and shape": (
        lambda root: edited(root / SHARD, b'"shape": [40, 72]', b'"shape": [41, 72]'),
        rf"{SHARD}: {DAMAGED}",
    ),
    "gap": (
        lambda root: save_raw(
            root / SHARD, {"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, bytes(8)
        ),
        rf"{SHARD}: {DAMAGED} \(\d+ bytes; .*4 bytes of no tensor in front of 'a'",
    ),
    "lines in a reason": (
        lambda root: save_raw(root / SHARD, {"a": {"dtype": "a\nb" + "c" * 999}}),
        rf"{SHARD}: {DAMAGED} \(\d+ bytes; .{{,200}}\); fetch",
    ),
    "tensor in two files": (
        lambda root: save(root / SHARD, dict(list(tensors().items())[:3])),
        r"tensor 'model.embed_tokens.weight' is also in model-00001-of-00003.safetensors",
    ),
    "index without map": (
        lambda root: (root / "model.safetensors.index.json").write_text("{}"),
        r"index.json: it must hold a 'weight_map' of tensors to files; fetch the file again",
    ),
    "index no JSON": (
        lambda root: (root / "model.safetensors.index.json").write_text("{"),
        r"index.json: is not valid JSON \(",
    ),
    "index twice": (
        lambda root: (root / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "b", "a": "c"}}'
        ),
        r"index.json: is not valid JSON \(the key 'a' is there twice\)",
    ),
    "index leaves the directory": (
        lambda root: indexed(root, lambda index: index.update({NORM: "../model.safetensors"})),
        rf"it puts tensor '{NORM}' in '../model.safetensors'; it must name a .safetensors file beside itself",
    ),
    "index misplaces": (
        lambda root: indexed(root, lambda index: index.update(dict.fromkeys(index, SHARD))),
        rf"it puts tensor 'model.embed_tokens.weight' in {SHARD}, which does not hold it",
    ),
    "index names an absent tensor": (
        lambda root: indexed(root, lambda index: index.update({"model.other.weight": SHARD})),
        rf"it puts tensor 'model.other.weight' in {SHARD}, which does not hold it; fetch the",
    ),
    "index forgets": (
        lambda root: indexed(root, lambda index: index.pop(NORM)),
        rf"it does not list tensor '{NORM}', which model-0000\d-of-00003.safetensors holds; fetch it again",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_checkpoint(fault: str, tmp_path: Path) -> None:
    root = sharded(tmp_path / "hf", tensors())
    damage, message = FAULTS[fault]
    damage(root)
    with pytest.raises(CheckpointError, match=message) as caught:
        locate(root, CONFIG, parsing.tensor_names(CONFIG))
    assert all(line.startswith((str(root), "...")) for line in str(caught.value).splitlines())


def test_all_faults_at_once(tmp_path: Path) -> None:
    actual = tensors()
    del actual[NORM]
    actual[DOWN] = ("I64", ONES.astype(np.int64))
    actual["lm_head.weight"] = entry(ONES, "F32")
    actual["model.extra"] = entry(ONES, "F16")
    with pytest.raises(CheckpointError) as caught:
        locate(single(tmp_path / "hf", actual), CONFIG, parsing.tensor_names(CONFIG))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert all(any(name in line for line in lines) for name in (NORM, DOWN, "lm_head.weight", "model.extra"))


def test_damaged_files_are_all_named(tmp_path: Path) -> None:
    root = sharded(tmp_path / "hf", tensors())
    (root / SHARD).unlink()
    os.truncate(root / "model-00003-of-00003.safetensors", 100)
    with pytest.raises(CheckpointError) as caught:
        locate(root, CONFIG, parsing.tensor_names(CONFIG))
    text = str(caught.value)
    assert f"it names '{SHARD}'" in text
    assert f"model-00003-of-00003.safetensors: {DAMAGED}" in text


def test_a_long_list_of_faults_is_cut(tmp_path: Path) -> None:
    many = {**tensors(), **{f"extra.{i}": entry(ONES, "F16") for i in range(100)}}
    with pytest.raises(CheckpointError) as caught:
        locate(single(tmp_path / "hf", many), CONFIG, parsing.tensor_names(CONFIG))
    lines = str(caught.value).splitlines()
    assert len(lines) == 61
    assert lines[-1] == "... and 40 more problems of these kinds"


BITS = {"BOOL": 8, "U8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F4": 4, "BF16": 16, "I16": 16}
BITS |= {"F16": 16, "U32": 32, "F32": 32, "I64": 64, "F64": 64}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    forms=st.lists(
        st.tuples(st.sampled_from(sorted(BITS)), st.lists(st.integers(0, 5), max_size=3)), max_size=12
    ),
    random=st.randoms(use_true_random=False),
    metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_tensors_lie_where_the_header_says(
    forms: list[tuple[str, list[int]]],
    random: Random,
    metadata: dict[str, str] | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Checks that the offset of each tensor follows from the order of the tensors' data, in whatever order
    the header names them."""
    expected, entries, end = set(), [], 0
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    for i, (dtype, sizes) in enumerate(forms):
        shape = [*sizes, 4]  # so that elements of 4 and 6 bits fill whole bytes
        start, end = end, end + math.prod(shape) * BITS[dtype] // 8
        entries.append((str(i), {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}))
        expected.add((str(i), dtype, tuple(shape), start, end - start))
    random.shuffle(entries)
    save_raw(path, {"__metadata__": metadata, **dict(entries)}, bytes(end))
    data = path.stat().st_size - end
    header = headers.read_header(path)
    with safe_open(path, "numpy") as other:  # the format's own reader agrees
        assert [tensor.name for tensor in header.tensors if tensor.size] == [
            name for name in other.offset_keys() if math.prod(other.get_slice(name).get_shape())
        ]
    assert header.metadata == (metadata or {})
    assert {(t.name, t.dtype, t.shape, t.start - data, t.size) for t in header.tensors} == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    change=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3), cut=st.integers(0, 600)
)
def test_a_damaged_header_is_refused_or_describes_the_file(
    change: list[tuple[int, int]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    save(path, {"a": ("F16", np.zeros((3, 5), np.float16)), "b": ("BF16", np.zeros(7, np.uint16))})
    data = bytearray(path.read_bytes())
    for place, value in change:
        data[place % len(data)] = value
    path.write_bytes(data[:cut] if cut < len(data) else data)
    try:
        actual = headers.read_header(path).tensors
    except CheckpointError:
        return
    start = 8 + int.from_bytes(data[:8], "little")
    document = json.loads(data[8:start])
    assert [[tensor.start - start, tensor.start - start + tensor.size] for tensor in actual] == [
        document[tensor.name]["data_offsets"] for tensor in actual
    ]
    assert actual[-1].start + actual[-1].size == path.stat().st_size
