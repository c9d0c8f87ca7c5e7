"""Tests of converting stacks of matrices, such as experts: each matrix is converted separately, however the
stack is divided into tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlcbuild import quant
from mlcbuild.checkpoints import conversion, exact_weights
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.errors import CheckpointError
from mlcbuild.models import Experts, ModelConfig, Piece, TensorNames, parameters
from mlcbuild.quant.stack import Stack
from tests.configs import rope
from tests.libharness import random_weights
from tests.schemes import SCHEMES, pack

EXPERTS, SIZE, HIDDEN = 3, 20, 36
"""Number of experts, rows of an expert's gate and up matrices, and hidden size of the test model. Neither
twice the second number nor the third is a multiple of 16, the rows of a tile."""


def config() -> ModelConfig:
    from tests.models.test_layers import NORM, PLAIN

    layer = replace(PLAIN, feed_forward=Experts(EXPERTS, 2, SIZE, bias=True))
    return ModelConfig("llama", 50, HIDDEN, 64, (layer,), (rope(8),), NORM)


MODEL = config()
WEIGHTS = random_weights(MODEL)
PAIR, DOWN = "layers.0.mlp.experts.gate_up.weight", "layers.0.mlp.experts.down.weight"


def divided(names: dict[str, tuple[Piece, ...]]) -> TensorNames:
    """Returns the tensor names of a checkpoint: `names` for the parameters that it lists, and a single tensor
    with the parameter's name for each other one."""
    whole = {param.name: (Piece(param.name, param.shape[0]),) for param in parameters(MODEL)}
    return TensorNames(whole | names)


WHOLE = divided({})
SEPARATE = divided(
    {
        PAIR: tuple(Piece(f"{part}.{e}", SIZE) for e in range(EXPERTS) for part in ("gate", "up")),
        DOWN: tuple(Piece(f"down.{e}", HIDDEN) for e in range(EXPERTS)),
    }
)


def checkpoint(folder: Path, names: TensorNames) -> Path:
    """Writes the test model's weights to two safetensors files with an index, in the new directory `folder`,
    and returns it. names: parameter -> the checkpoint tensors that make it up."""
    folder.mkdir()
    tensors = {}
    for param in parameters(MODEL):
        pieces = names.sources[param.name]
        if len(pieces) == 1:
            tensors[pieces[0].tensor] = WEIGHTS[param.name]
            continue
        rows = np.cumsum([piece.rows for piece in pieces])[:-1]
        flat = WEIGHTS[param.name].reshape(-1, param.shape[-1])
        tensors |= dict(zip([piece.tensor for piece in pieces], np.split(flat, rows), strict=True))
    shards = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, shard in shards.items():
        save_file({name: np.ascontiguousarray(tensors[name]) for name in shard}, folder / file)
    index = {"weight_map": {name: file for file, shard in shards.items() for name in shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("scheme", ["q0f32", "q4f16_1", "q4a8_1"])
def test_each_matrix_of_a_stack_is_packed_by_itself(scheme: str, tmp_path: Path) -> None:
    storage = SCHEMES[scheme]
    files: list[bytes] = []
    for names in (WHOLE, SEPARATE):
        folder = tmp_path / str(len(files))
        conversion.write(locate(checkpoint(folder, names), MODEL, names), storage, folder / "out", cores=2)
        files.append((folder / "out" / "weights-00001-of-00001.safetensors").read_bytes())
        stored = conversion.read(folder / "out")
    assert files[0] == files[1]
    for param in parameters(MODEL):
        if len(param.shape) == 3 and scheme != "q0f32":
            for place, tensor in enumerate(quant.stored(param, storage)):
                expected = np.concatenate([pack(matrix, storage)[place] for matrix in WEIGHTS[param.name]])
                assert stored[tensor.name].shape == tensor.shape
                assert np.array_equal(stored[tensor.name], expected)


def test_a_stack_is_read_one_matrix_at_a_time(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hf", SEPARATE)
    original = exact_weights.checkpoint(folder, MODEL, SEPARATE)
    conversion.write(locate(folder, MODEL, SEPARATE), SCHEMES["q0f32"], tmp_path / "out")
    for weights in (original, conversion.unpacked(tmp_path / "out", MODEL, SCHEMES["q0f32"])):
        assert isinstance(weights[PAIR], Stack)
        assert weights[PAIR].shape == WEIGHTS[PAIR].shape
        assert np.array_equal(weights[PAIR][2], WEIGHTS[PAIR][2])
        assert np.array_equal(np.asarray(weights[DOWN]), WEIGHTS[DOWN])


def test_the_parameters_that_choose_experts_are_never_quantized() -> None:
    stored = {tensor.name: tensor for tensor in quant.stored_parameters(parameters(MODEL), SCHEMES["q4a8_1"])}
    assert stored["layers.0.mlp.router.weight"].dtype == "float16"
    assert stored["layers.0.mlp.router.weight"].shape == (EXPERTS, HIDDEN)
    assert stored["layers.0.mlp.experts.down.bias"].shape == (EXPERTS, HIDDEN)


def test_an_override_matches_experts_by_name() -> None:
    scheme = replace(SCHEMES["q4a8_1"], overrides=(("*experts.down", SCHEMES["q8a8_1"]),))
    sizes = {tensor.name: tensor.shape for tensor in quant.stored_parameters(parameters(MODEL), scheme)}
    assert quant.check_overrides(scheme, parameters(MODEL)) == ()
    tiles = EXPERTS * 3  # 36 rows are three tiles of 16
    assert sizes["layers.0.mlp.experts.down.q_weight"] == (tiles, 1, 64 * 8)
    assert sizes["layers.0.mlp.experts.gate_up.q_weight"] == (tiles, 2, 64 * 4)


def test_a_matrix_of_another_shape_is_named(tmp_path: Path) -> None:
    names = divided({DOWN: tuple(Piece(f"down.{e}", HIDDEN) for e in range(EXPERTS))})
    folder = checkpoint(tmp_path / "hf", names)
    wrong = divided({DOWN: (*names.sources[DOWN][:2], Piece("down.2", HIDDEN + 1))})
    with pytest.raises(CheckpointError, match=r"'down.2' must have the shape \[37, 20\].* found \[36, 20\]"):
        locate(folder, MODEL, wrong)
