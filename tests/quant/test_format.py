"""Tests of the rules that every stored format must obey, and of loading formats."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from mlcbuild.errors import UsageError
from mlcbuild.quant import format
from mlcbuild.quant.floats import Scratch
from mlcbuild.quant.format import format_names, layouts, load_format
from mlcbuild.quant.groups import TILE_ROWS
from tests.schemes import normal

FORMATS = [(name, layout) for name in format_names() for layout in layouts(name)]
EACH = pytest.mark.parametrize(("name", "layout"), FORMATS)
EACH_OF_FLOATS = pytest.mark.parametrize(
    ("name", "layout"), [own for own in FORMATS if load_format(*own).blocks is None]
)
"""The formats to which any weights can be quantized, without those that only keep the values of quantized
checkpoints (see test_blocks.py)."""


@EACH_OF_FLOATS
@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (48, 64)])
def test_packed_tensors_have_the_stated_form(name: str, layout: str, shape: tuple[int, int]) -> None:
    form = load_format(name, layout)
    weight = normal(*shape)
    tensors = form.pack(weight, Scratch(), name)
    assert [(part.shape, str(part.dtype)) for part in tensors] == [
        (tensor.shape(*shape), tensor.dtype) for tensor in form.tensors
    ]
    assert {len(part) for part in tensors} == {-(-shape[0] // form.rows_per_index)}
    back = form.unpack([part.copy() for part in tensors], shape)
    assert (back.shape, str(back.dtype)) == (shape, "float32")
    assert np.abs(back - weight).max() <= np.abs(weight).max() * 2.0 ** -max(form.bits - 1, 3)


@EACH_OF_FLOATS
def test_rows_are_packed_alike_in_parts(name: str, layout: str) -> None:
    """Checks that packing a matrix a few rows at a time, with one scratch memory, gives the same bytes as
    packing it at once."""
    form, weight, scratch = load_format(name, layout), normal(40, 100), Scratch()
    whole = [part.tobytes() for part in form.pack(weight, Scratch(), name)]
    parts = [b""] * len(whole)
    for start in range(0, 40, TILE_ROWS):
        for i, part in enumerate(form.pack(weight[start : start + TILE_ROWS], scratch, name)):
            parts[i] += part.tobytes()
    assert parts == whole


@EACH
def test_bits_per_weight_is_what_is_stored(name: str, layout: str) -> None:
    form = load_format(name, layout)
    sizes = [format.ITEM_BYTES[part.dtype] * math.prod(part.shape(64, 1024)) for part in form.tensors]
    assert 8 * sum(sizes) / (64 * 1024) == form.bits_per_weight


def test_formats_that_are_not_there() -> None:
    with pytest.raises(UsageError, match=r"format 'q4f61' does not exist; did you mean 'q4f16'\?"):
        layouts("q4f61")
    with pytest.raises(
        UsageError,
        match="format 'q4f16' cannot be stored in layout 'x16', which the backend of the target reads; it "
        "has: row; choose a scheme that the device supports",
    ):
        load_format("q4f16", "x16")


def test_loading_a_built_in_format_loads_no_numpy() -> None:
    """Checks that loading a built-in format and reading its sizes, as plans do, does not import NumPy."""
    code = (
        "import sys; from mlcbuild.quant.format import format_names, layouts;"
        "sizes = [t.shape(8, 64) for n in format_names() for f in layouts(n).values() for t in f.tensors];"
        "sys.exit(not sizes or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
