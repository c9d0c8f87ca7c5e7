"""Tests of LoRA adapters that are merged while rows are read: the results are compared with PEFT's float32
merge, and errors and steps of recipes are tested."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mlcbuild import models, pipeline, quant, recipe
from mlcbuild.build.graph import Step
from mlcbuild.checkpoints import conversion, exact_weights
from mlcbuild.checkpoints.completeness import weights_faults
from mlcbuild.checkpoints.fetch import local_files
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.checkpoints.lora import merging
from mlcbuild.checkpoints.mapping import PLAIN, locate
from mlcbuild.checkpoints.row_reader import ParameterSource, Rows
from mlcbuild.errors import CheckpointError, InputError
from mlcbuild.models.action import normalise
from tests.checkpoint_files import entry, save
from tests.conftest import TINY
from tests.schemes import SCHEMES
from tests.torch_writer import pickled, text, torch_file, zipped

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "adapters"


def tensors(path: Path) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in read_header(path).tensors}


def rows(tensor: Tensor, step: int) -> NDArray[np.float32]:
    """Returns all rows of a matrix, read `step` at a time."""
    with Rows() as reader:
        starts = range(0, tensor.shape[0], step)
        return np.concatenate([reader.values(tensor, i, min(step, tensor.shape[0] - i)) for i in starts])


def distance(actual: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Returns the largest difference between two float32 arrays, in units of the last place."""
    return float((np.abs(actual.astype(np.float64) - other) / np.spacing(np.abs(other))).max())


MOST = {"plain": 0, "root": 0, "twin": 0, "patterns": 0, "dora": 0}
"""Adapter -> largest allowed difference from PEFT's result, in units of the last place."""


@pytest.mark.parametrize(("name", "most"), MOST.items())
def test_the_merge_is_that_of_peft(name: str, most: int) -> None:
    """Checks that merging one LoRA adapter computes the matrices that PEFT has merged. name: directory of the
    adapter; most: largest allowed difference, in float32 units of the last place."""
    compare([(GOLDEN / name, 1.0)], GOLDEN / f"{name}-merged.safetensors", most)


@pytest.mark.parametrize(("golden", "most"), [("together", 2), ("added", 0)])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_several_adapters_with_factors_are_those_of_peft(
    golden: str, most: int, suffix: str, tmp_path: Path
) -> None:
    """Checks that merging several adapters with factors computes the matrices that PEFT has merged. PEFT
    applies a DoRA adapter to weights to which other adapters have been merged and subtracts their changes
    again; here its norms are computed from the base weights."""
    listed = json.loads((GOLDEN / f"{golden}.json").read_text())
    adapters = [(GOLDEN / name, factor) for name, factor in listed]
    if suffix == "bin":
        adapters = [(as_torch(path, tmp_path / path.name), factor) for path, factor in adapters]
    compare(adapters, GOLDEN / f"{golden}-merged.safetensors", most)


def as_torch(source: Path, target: Path) -> Path:
    """Copies an adapter, with its weights converted to a file in torch.save's format, and returns the copy's
    path."""
    target.mkdir()
    shutil.copy(source / "adapter_config.json", target)
    stored = load_file(source / "adapter_model.safetensors")
    content = {name: ("F32", values) for name, values in stored.items()}
    (target / "adapter_model.bin").write_bytes(torch_file(content))
    return target


def test_safetensors_come_before_a_pickle(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "plain", tmp_path / "both")
    (tmp_path / "both" / "adapter_model.bin").write_bytes(b"not read")
    compare([(tmp_path / "both", 1.0)], GOLDEN / "plain-merged.safetensors", 0)


def test_nothing_in_a_pickle_is_executed(tmp_path: Path) -> None:
    path = as_torch(GOLDEN / "plain", tmp_path / "evil")
    mark = tmp_path / "executed"
    call = b"cos\nsystem\n(" + text(f"touch {mark}") + b"tR"
    (path / "adapter_model.bin").write_bytes(zipped({"archive/data.pkl": pickled({"a": call})}))
    with pytest.raises(CheckpointError, match=r"adapter_model.bin: .*os.system"):
        merging([(path, 1.0)], tensors(GOLDEN / "base.safetensors"))
    assert local_files(path, is_adapter=True) == ("adapter_config.json", "adapter_model.bin")
    assert len(weights_faults(path, ("adapter_config.json", "adapter_model.bin"))) == 1
    assert not mark.exists()


def compare(adapters: list[tuple[Path, float]], golden: Path, most: int) -> None:
    base, expected = tensors(GOLDEN / "base.safetensors"), tensors(golden)
    merged = merging(adapters, base)
    assert {name for name in base if merged[name] is not base[name]} == set(expected)
    for name, tensor in expected.items():
        unpacked, other = rows(merged[name], 7), rows(tensor, 1000)
        np.testing.assert_array_equal(unpacked, rows(merged[name], 1000))
        assert distance(unpacked, other) <= most, name


def adapter(root: Path, content: dict[str, Any], **fields: object) -> Path:
    root.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **fields}
    (root / "adapter_config.json").write_text(json.dumps(config))
    save(
        root / "adapter_model.safetensors",
        {f"base_model.model.{name}": item for name, item in content.items()},
    )
    return root


def pair(module: str, shape: tuple[int, int], rank: int = 2, code: str = "F32") -> dict[str, Any]:
    random = np.random.default_rng(5)
    first, second = (
        random.standard_normal(size, np.float32) for size in ((rank, shape[1]), (shape[0], rank))
    )
    return {f"{module}.lora_A.weight": entry(first, code), f"{module}.lora_B.weight": entry(second, code)}


def zeros(area: Path, shape: tuple[int, ...]) -> dict[str, Tensor]:
    content = {f"{Q}.weight": entry(np.zeros(shape, np.float32), "F32")}
    save(area / "b.safetensors", content)
    return tensors(area / "b.safetensors")


Q = "model.layers.0.self_attn.q_proj"
OWN = pair(Q, (32, 32))
ONES = entry(np.ones(32, np.float32), "F32")
WRONG: list[tuple[dict[str, Any], dict[str, object], str]] = [
    (pair(Q, (32, 16)), {}, r"lora_A.weight' must have the shape \[2, 32\], as its config and the base say"),
    (pair(Q, (32, 32), 3), {}, r"must have the shape \[2, 32\], as its config and the base say; found \[3"),
    (pair("model.layers.9.x", (32, 32)), {}, r"it changes 'model.layers.9.x.weight', which the checkpoint"),
    ({}, {}, r"it holds no tensors; save the adapter again"),
    (OWN, {"use_dora": True}, r"module '.*q_proj' lacks its lora_magnitude_vector"),
    (OWN, {"peft_type": "IA3"}, r"peft_type: must be LORA, found \"IA3\"; merge it"),
    (OWN, {"r": 0}, r"r: must be an integer from 1 to 65536, found 0"),
    (OWN, {"lora_alpha": "x"}, r"lora_alpha: must be a finite number, found \"x\""),
    (OWN, {"use_rslora": 1}, r"use_rslora: must be true or false, found 1"),
    (OWN, {"rank_pattern": {"(": 1}}, r"rank_pattern: '\(' is no regular expression"),
    (OWN, {"rank_pattern": {"q": 0}}, r"rank_pattern: 'q' has the value 0, which is no such number"),
    (OWN, {"rank_pattern": [1]}, r"rank_pattern: must be an object, found"),
    (OWN, {"alpha_pattern": {"(a+)+b": 1}}, r"alpha_pattern: '\(a\+\)\+b' is no name of modules"),
    (OWN, {"init_lora_weights": "pissa"}, r"init_lora_weights: \"pissa\" changes the weights of the base"),
    (OWN, {"lora_bias": True}, r"lora_bias: true is not supported; merge the adapter with PEFT"),
    ({f"{Q}.lora_E": ONES}, {}, r"lora_E' is no part of a plain LoRA adapter"),
    ({f"{Q}.lora_A.weight": OWN[f"{Q}.lora_A.weight"]}, {}, r"lacks its lora_B"),
    ({f"{Q}.lora_magnitude_vector": ONES, **OWN}, {}, r"belongs to DoRA, but adapter_config.json has no use"),
    ({f"{Q}.weight": ONES}, {}, r"must have the shape \[32, 32\]"),
    ({f"{Q}.lora_A.weight": ("I32", np.ones((2, 32), np.int32))}, {}, r"is I32; adapters must be F32, F16"),
]


@pytest.mark.parametrize(("content", "fields", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_adapters_that_do_not_fit(
    content: dict[str, Any], fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    base = zeros(tmp_path, (32, 32))
    with pytest.raises(CheckpointError, match=message):
        merging([(adapter(tmp_path / "a", content, **fields), 1.0)], base)


def test_a_factor_cannot_scale_what_replaces_weights(tmp_path: Path) -> None:
    whole = adapter(tmp_path / "a", {f"{Q}.weight": entry(np.ones((32, 32), np.float32), "F32")})
    with pytest.raises(CheckpointError, match=r"replaces weights of the base, which no 'weight' can scale"):
        merging([(whole, 0.5)], zeros(tmp_path, (32, 32)))


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_no_adapter_replaces_what_one_before_it_changed(prefix: str, tmp_path: Path) -> None:
    """Checks that the replacement of a changed tensor is refused. prefix: what the checkpoint has before
    transformers' name of the tensor."""
    base = {
        name: replace(tensor, name=f"{prefix}{name}") for name, tensor in zeros(tmp_path, (32, 32)).items()
    }
    part = (adapter(tmp_path / "part", OWN), 1.0)
    ones = np.ones((32, 32), np.float32)
    whole = (adapter(tmp_path / "whole", {f"{Q}.weight": entry(ones, "F32")}), 1.0)
    message = (
        rf"whole/.*'base_model.model.{Q}.weight' replaces a tensor that an adapter before it has changed"
    )
    with pytest.raises(CheckpointError, match=message):
        merging([part, whole], base)
    with pytest.raises(CheckpointError, match=message):
        merging([whole, whole], base)
    change, both = (rows(merging(adapters, base)[f"{Q}.weight"], 32) for adapters in ([part], [whole, part]))
    np.testing.assert_array_equal(both, ones + change)


RECIPE = """\
version: 1
models:
  base: ./tiny
  tuned: {source: ./tiny, adapters: [./one, {source: ./two, weight: -0.5}]}
quantizations: [q4a8_1]
targets: [x86-64-v3]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Writes a recipe with the embedded model and two adapters for it, and returns its directory."""
    shutil.copytree(TINY, tmp_path / "tiny")
    stored = tensors(TINY / "model.safetensors")
    for name, module in (("one", "self_attn.o_proj"), ("two", "mlp.down_proj")):
        shape = stored[f"model.layers.0.{module}.weight"].shape
        adapter(tmp_path / name, pair(f"model.layers.0.{module}", (shape[0], shape[1]), code="BF16"))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_an_adapter_changes_the_weights_and_shares_the_library(project: Path) -> None:
    graph = pipeline.build(recipe.load(project / "recipe.yaml"), Lock({})).graph
    kinds = [name.partition("/")[0] for name in graph.nodes if isinstance(graph.nodes[name], Step)]
    assert kinds.count("library") == 1
    assert kinds.count("weights") == 2
    (step,) = (node for name, node in graph.nodes.items() if name.startswith("weights/tuned"))
    assert isinstance(step, Step)
    assert step.params["adapters"] == ["1.0", "-0.5"]
    assert sorted(step.inputs) == ["adapter-1", "adapter-2", "checkpoint", "config"]
    assert "mlcbuild.checkpoints.lora" in step.code
    (plain,) = (node for name, node in graph.nodes.items() if name.startswith("weights/base"))
    assert isinstance(plain, Step)
    assert "adapters" not in plain.params
    assert "mlcbuild.checkpoints.lora" not in plain.code


def test_the_weights_step_merges(project: Path) -> None:
    inputs = {"checkpoint": project / "tiny", "config": project / "config"}
    normalise({}, inputs, project / "config")
    config = models.from_json(json.loads((project / "config" / "config.json").read_bytes()))
    more = {**inputs, "adapter-1": project / "one", "adapter-2": project / "two"}
    scheme = SCHEMES["q0f32"]

    conversion.convert({"scheme": quant.to_json(scheme), "adapters": ["1.0", "-0.5"]}, more, project / "out")
    unpacked = conversion.unpacked(project / "out", config, scheme)
    names = exact_weights.read_tensor_names(project / "config")
    base = exact_weights.checkpoint(project / "tiny", config, names)
    changed = {
        name for name in base if not np.array_equal(np.asarray(unpacked[name]), np.asarray(base[name]))
    }
    assert changed == {"layers.0.attn.o.weight", "layers.0.mlp.down.weight"}


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_tied_embedding_may_be_replaced_together_with_the_output_matrix(prefix: str, project: Path) -> None:
    """Checks adapters for the embedded model, which ties its output matrix to the embedding: PEFT saves both,
    equal if it keeps them tied (ensure_weight_tying)."""
    inputs = {"checkpoint": project / "tiny", "config": project / "config"}
    normalise({}, inputs, project / "config")
    config = models.from_json(json.loads((project / "config" / "config.json").read_bytes()))
    names = exact_weights.read_tensor_names(project / "config")
    table = np.full(tensors(TINY / "model.safetensors")["model.embed_tokens.weight"].shape, 0.5, np.float32)

    def located(name: str, head: NDArray[np.float32], *more: str) -> tuple[ParameterSource, ...]:
        content = {"model.embed_tokens.weight": table, "lm_head.modules_to_save.weight": head}
        stored = {f"{prefix}{key}": entry(value, "F32") for key, value in content.items() if key not in more}
        place = adapter(project / name, stored)
        views = replace(PLAIN, adapted=partial(merging, [(place, 1.0)]))
        return locate(project / "tiny", config, names, views)

    assert np.array_equal(rows(located("equal", table)[0].pieces[0], 64), table)
    for name, head, *more in (
        ("different", table * 2),
        ("alone", table, "model.embed_tokens.weight"),
        ("cut", table[1:]),
    ):
        with pytest.raises(CheckpointError, match=r"lm_head.modules_to_save.weight'|tensor 'lm_head.weight'"):
            located(name, head, *more)
    low = adapter(project / "low", pair("lm_head", (table.shape[0], table.shape[1])))
    with pytest.raises(CheckpointError, match=r"if the model's output matrix is its embedding, merge"):
        merging([(low, 1.0)], tensors(TINY / "model.safetensors"))


def test_an_embedding_that_is_replaced_alone_is_no_longer_tied(project: Path) -> None:
    """Checks that the output matrix stays the base's embedding, which a config that ties them refuses."""
    base, name = tensors(TINY / "model.safetensors"), "model.embed_tokens.weight"
    table, fields = np.full(base[name].shape, 0.5, np.float32), {"modules_to_save": ["embed_tokens"]}
    place = adapter(project / "own", {name: entry(table, "F32")}, **fields)
    tied = adapter(project / "tied", {name: entry(table, "F32")}, **fields, ensure_weight_tying=True)
    assert "lm_head.weight" not in merging([(tied, 1.0)], base)
    views = replace(PLAIN, adapted=partial(merging, [(place, 1.0)]))

    def ends(is_tied: bool) -> list[NDArray[np.float32]]:
        path = project / "tiny" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "tie_word_embeddings": is_tied}))
        out = project / str(is_tied)
        normalise({}, {"checkpoint": project / "tiny"}, out)
        config = models.from_json(json.loads((out / "config.json").read_bytes()))
        located = locate(project / "tiny", config, exact_weights.read_tensor_names(out), views)
        return [
            rows(source.pieces[0], 64)
            for source in located
            if source.param.name in ("embed.weight", "lm_head.weight")
        ]

    embedding, head = ends(is_tied=False)
    assert np.array_equal(embedding, table) and np.array_equal(head, rows(base[name], 64))
    with pytest.raises(CheckpointError, match=r"config\.json ties them"):
        ends(is_tied=True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("./one,", "./tiny,", "adapter_config.json; an adapter is what PEFT's save_pretrained writes"),
        ("./one,", "./missing,", "there is no directory './missing'"),
        ("./one,", "./tiny/config.json,", "a source is the directory of a checkpoint"),
        ("-0.5", "much", "'weight' must be a number"),
        ("source: ./tiny,", "source: ./one,", "it holds an adapter and no model; list it under 'adapters'"),
        ("[q4a8_1]", "[as-is]", "as-is' keeps the values of quantized tensors"),
    ],
)
def test_recipes_with_wrong_adapters(old: str, new: str, message: str, project: Path) -> None:
    (project / "recipe.yaml").write_text(RECIPE.replace(old, new))
    with pytest.raises(InputError) as error:
        pipeline.build(recipe.load(project / "recipe.yaml"), Lock({}))
    assert message in str(error.value)
