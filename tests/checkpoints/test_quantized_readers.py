"""Tests of each reader of quantized checkpoints, with a matrix of a few numbers that is computed here by the
definition of its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints import scaled_floats
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.number_types import SMALL_FLOATS
from mlcbuild.checkpoints.quantized import (
    awq_reader,
    bitsandbytes_reader,
    compressed_tensors_reader,
    fbgemm_fp8_reader,
    fp8_reader,
    gptq_reader,
    mlx_reader,
    modelopt_reader,
    mxfp4_reader,
)
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.errors import CheckpointError
from tests.checkpoint_files import Entry, save

READERS = (
    awq_reader, bitsandbytes_reader, compressed_tensors_reader, fbgemm_fp8_reader, fp8_reader, gptq_reader,
    mlx_reader, modelopt_reader, mxfp4_reader,
)  # fmt: skip
RANDOM = np.random.default_rng(11)
CODES = RANDOM.integers(0, 16, (16, 64)).astype(np.int64)
"""Random 4-bit codes of a quantized matrix, as integers from 0 to 15 with the shape [outputs, inputs]."""
SCALES = np.exp2(RANDOM.integers(-6, 0, (16, 2))).astype(np.float32)
"""Scales [outputs, groups of 32]; powers of two, so that products are exact."""


def words(codes: NDArray[np.int64]) -> NDArray[np.int32]:
    """Returns 4-bit codes as int32 words, eight to a word along the last axis, the first in the low bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    packed = (parts << (4 * np.arange(8, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
    result: NDArray[np.int32] = packed.view(np.int32)
    return result


def stored(place: Path, **arrays: Entry) -> dict[str, Tensor]:
    """Writes a safetensors file with the tensors a.<name>, one for each of `arrays`, which are (dtype,
    array), and returns tensor name -> its place in that file."""
    path = place / "model.safetensors"
    save(path, {f"a.{name}": entry for name, entry in arrays.items()})
    return {tensor.name: tensor for tensor in read_header(path).tensors}


def values(tensor: Tensor) -> NDArray[np.float32]:
    """Returns the rows of a tensor, and asserts that a range of them is the same as in the whole."""
    with Rows() as rows:
        whole = rows.values(tensor, 0, tensor.shape[0])
        np.testing.assert_array_equal(rows.values(tensor, 3, 5), whole[3:8])
    return whole


def test_gptq_packs_along_the_inputs_and_adds_one_to_zeros(tmp_path: Path) -> None:
    zeros = RANDOM.integers(5, 9, (2, 16)).astype(np.int64)
    tensors = stored(
        tmp_path,
        qweight=("I32", words(CODES).T.copy()),
        qzeros=("I32", words(zeros)),
        scales=("F32", SCALES.T.copy()),
        g_idx=("I32", np.arange(64, dtype=np.int32) // 32),
    )
    settings = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
    expected = (CODES - np.repeat(zeros.T + 1, 32, axis=1)) * np.repeat(SCALES, 32, axis=1)
    np.testing.assert_array_equal(values(gptq_reader.view(settings, tensors)["a.weight"]), expected)


def test_awq_packs_along_the_outputs_in_its_order(tmp_path: Path) -> None:
    zeros, order = RANDOM.integers(0, 16, (2, 16)).astype(np.int64), [0, 2, 4, 6, 1, 3, 5, 7]
    packed = words(CODES.T.reshape(64, 2, 8)[:, :, order].reshape(64, 16))
    tensors = stored(
        tmp_path,
        qweight=("I32", packed),
        qzeros=("I32", words(zeros.reshape(2, 2, 8)[:, :, order].reshape(2, 16))),
        scales=("F32", SCALES.T.copy()),
    )
    expected = (CODES - np.repeat(zeros.T, 32, axis=1)) * np.repeat(SCALES, 32, axis=1)
    settings = {"bits": 4, "group_size": 32, "version": "gemm"}
    np.testing.assert_array_equal(values(awq_reader.view(settings, tensors)["a.weight"]), expected)
    with pytest.raises(CheckpointError, match="version gemv cannot be read; it must be gemm"):
        awq_reader.view({"version": "gemv"}, {})


def test_mlx_adds_a_bias(tmp_path: Path) -> None:
    biases = -8 * SCALES
    tensors = stored(
        tmp_path,
        weight=("U32", words(CODES).view(np.uint32)),
        scales=("F32", SCALES),
        biases=("F32", biases),
    )
    expected = CODES * np.repeat(SCALES, 32, axis=1) + np.repeat(biases, 32, axis=1)
    actual = values(mlx_reader.view({"bits": 4, "group_size": 32}, tensors)["a.weight"])
    np.testing.assert_array_equal(actual, expected)
    with pytest.raises(CheckpointError, match="the mode mxfp4 cannot be read; convert the model with affine"):
        mlx_reader.view({"mode": "mxfp4"}, {})


FLOATS = np.array(SMALL_FLOATS["F8_E4M3"], np.float32)
BYTES = np.flatnonzero(np.isfinite(FLOATS))[RANDOM.integers(0, 250, (16, 64))].astype(np.uint8)


@pytest.mark.parametrize(
    ("reader", "part", "block"),
    [
        (fp8_reader, "weight_scale_inv", (8, 32)),
        (fp8_reader, "weight_scale", None),
        (fbgemm_fp8_reader, "weight_scale", None),
    ],
)
def test_8_bit_floats_are_multiplied_by_the_scale_of_their_block(
    reader: Any, part: str, block: tuple[int, int] | None, tmp_path: Path
) -> None:
    scale = np.exp2(RANDOM.integers(-9, 0, (2, 2) if block else (16, 1))).astype(np.float32)
    tensors = stored(tmp_path, weight=("F8_E4M3", BYTES), **{part: ("F32", scale)})
    settings = {"weight_block_size": list(block)} if block else {}
    wide = np.repeat(np.repeat(scale, 8, axis=0), 32, axis=1) if block else scale
    actual = values(reader.view(settings, tensors)["a.weight"])
    np.testing.assert_array_equal(actual, FLOATS[BYTES] * wide)


def test_scales_of_a_wrong_shape_are_refused(tmp_path: Path) -> None:
    scale = np.ones((3, 1), np.float32)
    tensors = stored(tmp_path, weight=("F8_E4M3", BYTES), weight_scale=("F32", scale))
    with pytest.raises(CheckpointError, match=r"must have a weight_scale of .*, found \[3, 1\]"):
        fp8_reader.view({}, tensors)
    with pytest.raises(CheckpointError, match="has blocks of 7; weight_block_size must be two sizes"):
        fp8_reader.view({"weight_block_size": 7}, tensors)
    assert scaled_floats.scaled is vars(fp8_reader)["scaled"]


def test_mxfp4_experts_are_read_by_columns(tmp_path: Path) -> None:
    """Checks reading gpt-oss's tensors of expert weights in MXFP4, for two experts with 64 inputs and 4
    outputs, and the error for blocks of a wrong shape. A byte holds two 4-bit codes, the first in its low
    half."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = RANDOM.integers(0, 16, (2, 4, 2, 32)).astype(np.uint8)
    exponents = RANDOM.integers(120, 130, (2, 4, 2)).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    tensors = stored(tmp_path, up_blocks=("U8", blocks), up_scales=("U8", exponents))
    tensor: Any = mxfp4_reader.view({}, tensors)["a.up"]
    assert tensor.shape == (2, 64, 4) and tensor.by_columns
    expected = numbers[codes] * np.exp2(exponents.astype(np.float32) - 127)[..., None]
    with Rows() as rows:
        columns = tensor.load(rows, 0, 8)
    np.testing.assert_array_equal(columns, expected.reshape(8, 64))
    with pytest.raises(CheckpointError, match=r"must have up_blocks of U8 \[experts, outputs, groups, 16\]"):
        mxfp4_reader.view({}, {**tensors, "a.up_blocks": tensors["a.up_scales"]})


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__.rpartition(".")[2])
def test_tensors_that_are_not_quantized_stay(reader: Any, tmp_path: Path) -> None:
    tensors = stored(tmp_path, norm=("F32", np.ones(4, np.float32)))
    settings = {
        "bits": 4, "group_size": 32, "quant_method": "bitsandbytes", "load_in_4bit": True,
        "quant_algo": "FP8", "format": "pack-quantized", "config_groups": {},
    }  # fmt: skip
    assert reader.view(settings, tensors) == tensors
