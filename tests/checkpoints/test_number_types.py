"""Tests of reading the number types of checkpoints, compared with ml_dtypes and NumPy."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mlcbuild.checkpoints import exact_weights
from mlcbuild.checkpoints.number_types import READABLE, SMALL_FLOATS, element_dtype, values_of
from mlcbuild.errors import CheckpointError
from mlcbuild.models import parsing
from tests.checkpoint_files import CONFIG, single, tensors, write
from tests.schemes import SCHEMES

PEERS = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("name", PEERS)
def test_every_8_bit_float_has_the_value_that_ml_dtypes_gives_it(name: str) -> None:
    expected = np.arange(256, dtype=np.uint8).view(PEERS[name]).astype(np.float32)
    np.testing.assert_array_equal(SMALL_FLOATS[name], expected)
    same = np.signbit(SMALL_FLOATS[name]) == np.signbit(expected)
    assert (same | np.isnan(expected)).all()


@pytest.mark.parametrize("name", READABLE)
def test_rows_are_read_in_every_type(name: str, tmp_path: Path) -> None:
    """Checks that tensors of every number type of checkpoint files are read as the right float32 values,
    whether all rows are read at once or a few at a time. The values are random and cover the finite range of
    the small types."""
    random = np.random.default_rng(3)
    dtype, shape = element_dtype(name), (40, 72)
    bits = random.integers(0, 256, (40, 72 * dtype.itemsize), np.uint8).view(dtype).reshape(shape)
    if name not in SMALL_FLOATS and dtype.kind == "f":
        bits = (random.standard_normal(shape) * 10.0 ** random.integers(-4, 4, shape)).astype(dtype)
    elif name == "BF16":
        bits = (random.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif name in SMALL_FLOATS:
        bits = np.where(np.isfinite(SMALL_FLOATS[name][bits]), bits, 0).astype(np.uint8)
    expected = bits.astype(np.float32)
    if name in PEERS:
        expected = bits.view(PEERS[name]).astype(np.float32)
    elif name == "BF16":
        expected = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    whole = tensors("F32")
    whole[DOWN] = (name, bits)
    root = single(tmp_path / "m", whole)
    read = exact_weights.checkpoint(root, CONFIG, parsing.tensor_names(CONFIG))
    np.testing.assert_array_equal(read["layers.0.mlp.down.weight"], expected)
    assert write(root, tmp_path / "out", SCHEMES["q0f32"]).is_dir()
    assert values_of(bits, name).dtype == np.float32


def test_numbers_beyond_float32_are_refused(tmp_path: Path) -> None:
    whole = tensors("F32")
    whole[DOWN] = ("F64", np.full((40, 72), 1e300))
    with pytest.raises(CheckpointError, match=r"it holds infinite or NaN weights"):
        write(single(tmp_path / "m", whole), tmp_path / "out", SCHEMES["q0f32"])
