"""Tests of the formats without quantization."""

from __future__ import annotations

import numpy as np
import pytest

from mlcbuild.errors import CheckpointError
from mlcbuild.quant.floats import Scratch
from mlcbuild.quant.format import load_format
from tests.schemes import normal


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_matrix_is_one_tensor_of_numbers(dtype: str) -> None:
    form = load_format({"float32": "f32", "float16": "f16"}[dtype], "plain")
    weight = normal(7, 9)
    (tensor,) = form.pack(weight, Scratch(), "a")
    assert tensor.tobytes() == weight.astype(dtype).tobytes()
    assert np.array_equal(form.unpack([tensor], (7, 9)), weight.astype(dtype).astype(np.float32))
    assert [part.suffix for part in form.tensors] == ["weight"], "the tensor keeps the parameter's name"


def test_numbers_beyond_half_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^a: it holds 70000, beyond the largest float16"):
        load_format("f16", "plain").pack(np.full((2, 2), 7e4, np.float32), Scratch(), "a")
