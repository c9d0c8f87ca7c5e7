"""Formats against a definition that works on one number at a time, in Python's own floats."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mlcbuild import quant
from mlcbuild.canon import Json, canonical
from mlcbuild.errors import CheckpointError, UsageError
from mlcbuild.models.config import Param
from mlcbuild.quant import Storage, floats, packing
from mlcbuild.quant.floats import Array
from tests.schemes import SCHEMES, pack, unpack

QUANTIZED = [scheme for scheme in SCHEMES.values() if scheme.bits]
EVERY = pytest.mark.parametrize("scheme", QUANTIZED, ids=lambda scheme: scheme.name)
PROPERTY = settings(max_examples=15, deadline=None, derandomize=True)
Matrix = NDArray[np.float32]


def f32(value: float) -> float:
    """Rounded to float32; of one division or sum of float32 numbers this is the float32 operation."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def stored_scale(value: float, scheme: Storage) -> float:
    return f32(value) if scheme.dtype == "float32" else float(struct.unpack("e", struct.pack("e", value))[0])


def quantized_group(group: list[float], scheme: Storage) -> tuple[list[int], float]:
    """(q, scale) of 32 weights, as quant.pack defines them."""
    extreme = max(group) if max(group) >= -min(group) else min(group)
    zero = 2 ** (scheme.bits - 1) - (scheme.layout == "row")
    if scheme.bits < 8:
        wide = fit(group, extreme, scheme.bits) * (1 if scheme.layout == "row" else -1)
        top = 2**scheme.bits - 1
    elif scheme.layout == "row":
        top, wide = 254, f32(abs(extreme) / 127)
    else:
        top, wide = 255, f32(extreme / -128)
    scale = stored_scale(wide, scheme)
    if scale == 0 and scheme.layout == "row":
        return [zero] * 32, 0.0
    scale = scale or 2.0**-24
    return [min(max(round(f32(f32(w / scale) + zero)), 0), top) for w in group], scale


def fit(group: list[float], extreme: float, bits: int) -> float:
    """The scale for levels -7 .. 8, or -15 .. 16."""
    if abs(extreme) < 2**-96:
        return 0.0
    unit, widths, high = (504, (63, 72, 59), 8) if bits == 4 else (240, (15, 16), 16)
    inverse = f32(unit / extreme)
    units = [round(f32(w * inverse)) for w in group]
    best, most = 0.0, 0.0
    for width in widths:
        codes = [min(max(math.floor(Fraction(u, width) + Fraction(1, 2)), 1 - high), high) for u in units]
        along = sum(u * c for u, c in zip(units, codes, strict=True))
        fitted = f32(along / sum(c * c for c in codes))
        if f32(fitted * along) > most:
            best, most = fitted, f32(fitted * along)
    return f32(extreme * f32(best / unit))


def definition(weight: Matrix, scheme: Storage) -> tuple[bytes, bytes, Matrix]:
    """(bytes of q_weight, bytes of q_scale, the matrix they stand for)."""
    rows, columns = weight.shape
    tile = 16 if scheme.layout == "x16" else 1
    groups, tiles = -(-columns // 32), -(-rows // tile)
    words = np.zeros((tiles, groups, tile * 4 * scheme.bits), np.uint8)
    scales = np.zeros((tiles, groups, tile), scheme.dtype)
    values = np.zeros((tiles * tile, groups * 32), np.float32)
    for row in range(tiles * tile):
        line = [float(w) for w in weight[row]] if row < rows else []
        line += [0.0] * (groups * 32 - len(line))
        t, r = divmod(row, tile)
        for g in range(groups):
            q, scale = quantized_group(line[g * 32 : g * 32 + 32], scheme)
            scales[t, g, r] = scale
            for k, number in enumerate(q):
                zero = 2 ** (scheme.bits - 1) - (tile == 1)
                values[row, g * 32 + k] = f32((number - zero) * scale)
                if tile == 16:
                    place, high = (k, 0) if scheme.bits == 8 else (k % 16, k // 16)
                    whole = number if scheme.bits == 8 else number & 15
                    words[t, g, place // 4 * 64 + r * 4 + k % 4] |= whole << (4 * high)
                    if scheme.bits == 5:
                        words[t, g, 256 + r * 4 + k % 4] |= number >> 4 << k // 4
                else:
                    words[t, g, k * scheme.bits // 8] |= number << (k * scheme.bits % 8)
    return words.tobytes(), scales.tobytes(), values[:rows, :columns]


def matrices(least: float = 0.0) -> st.SearchStrategy[Matrix]:
    """Small matrices of any shape: zeros, and magnitudes from `least` to what float16 scales can hold."""
    magnitude = st.floats(np.float32(least).item(), 65504.0, width=32)
    signed = st.builds(lambda sign, value: sign * value, st.sampled_from((1.0, -1.0)), magnitude)
    elements = st.sampled_from((0.0, -0.0)) | signed
    return st.tuples(st.integers(1, 18), st.integers(1, 70)).flatmap(
        lambda shape: arrays(np.float32, shape, elements=elements)
    )


def normal(rows: int, columns: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)


@EVERY
@PROPERTY
@given(weight=matrices())
def test_equals_the_definition(scheme: Storage, weight: Matrix) -> None:
    q_weight, q_scale = pack(weight, scheme)
    words, scales, values = definition(weight, scheme)
    assert q_weight.tobytes() == words
    assert q_scale.tobytes() == scales
    assert np.array_equal(unpack((q_weight, q_scale), scheme, (len(weight), weight.shape[1])), values)


@EVERY
def test_equals_the_definition_on_normal_weights(scheme: Storage) -> None:
    weight = normal(33, 100) * np.float32(0.02)
    q_weight, q_scale = pack(weight, scheme)
    assert (q_weight.tobytes(), q_scale.tobytes()) == definition(weight, scheme)[:2]


@EVERY
@PROPERTY
@given(weight=matrices())
def test_error_is_at_most_half_a_step_but_for_clipping(scheme: Storage, weight: Matrix) -> None:
    q_weight, q_scale = pack(weight, scheme)
    shape = (len(weight), weight.shape[1])
    error = np.abs(weight.astype(np.float64) - unpack((q_weight, q_scale), scheme, shape))
    by_row = q_scale if scheme.layout == "row" else q_scale.transpose(0, 2, 1).reshape(-1, q_scale.shape[1])
    step = np.repeat(by_row.astype(np.float64), 32, axis=1)[: shape[0], : shape[1]]
    largest = 2 ** (scheme.bits - 1) - 1
    # A quotient in float32 is off by at most 2**-23 of its size, 2**-16 of a step; a zero scale loses all.
    allowed = np.abs(step) * (0.5 + 2**-15) + np.maximum(np.abs(weight) - largest * np.abs(step), 0)
    assert (error <= allowed).all()


@pytest.mark.parametrize("scheme", [s for s in QUANTIZED if s.bits == 8], ids=lambda s: s.name)
@PROPERTY
@given(weight=matrices(least=0.125))
def test_packing_again_changes_nothing(scheme: Storage, weight: Matrix) -> None:
    shape = (len(weight), weight.shape[1])
    first = pack(weight, scheme)
    again = pack(unpack(first, scheme, shape), scheme)
    assert [part.tobytes() for part in first] == [part.tobytes() for part in again]


@pytest.mark.parametrize("scheme", [s for s in QUANTIZED if s.bits < 8], ids=lambda s: s.name)
@pytest.mark.parametrize("extreme", [-1, 0, 1])
def test_weights_that_lie_on_the_levels_are_kept(scheme: Storage, extreme: int) -> None:
    """As those of checkpoints that were trained for 4 bits, or of other 4-bit formats."""
    rng, top = np.random.default_rng(5), 2 ** (scheme.bits - 1) - 1
    scale = rng.uniform(0.001, 0.01, (64, 4, 1)).astype(np.float16).astype(np.float32)
    levels = rng.integers(-top, top, (64, 4, 32), endpoint=extreme != 0).astype(np.float32)
    levels[:, :, 3] = {-1: -top - 1, 0: -top, 1: top}[extreme]
    weight = (levels * scale * rng.choice((1, -1), scale.shape)).astype(np.float32).reshape(64, 128)
    found = unpack(pack(weight, scheme), scheme, weight.shape)
    np.testing.assert_allclose(found, weight, rtol=0 if scheme.dtype == "float16" else 3e-7, atol=0)


@pytest.mark.parametrize("scheme", [s for s in QUANTIZED if s.bits < 8], ids=lambda s: s.name)
def test_squared_error_of_few_bits(scheme: Storage) -> None:
    """On gaussian weights, next to what scales of extreme / -8 or of max|w| / 7 leave; 5 bits: 16, 15."""
    top = 2 ** (scheme.bits - 1)
    weight = normal(64, 4096)
    groups = weight.reshape(-1, 32).astype(np.float64)
    extreme = groups[np.arange(len(groups)), np.abs(groups).argmax(1)][:, None]

    def error(scale: NDArray[np.float64], least: int, most: int) -> float:
        return float(((np.clip(np.rint(groups / scale), least, most) * scale - groups) ** 2).mean())

    found = float(((unpack(pack(weight, scheme), scheme, weight.shape) - weight) ** 2).mean())
    assert found < {4: 0.915, 5: 0.925}[scheme.bits] * error(extreme / -top, -top, top - 1)
    assert found < {4: 0.72, 5: 0.82}[scheme.bits] * error(np.abs(extreme) / (top - 1), 1 - top, top - 1)
    steps = np.arange(top - 2, top + 3, 0.05)
    finest = np.min(
        [
            ((np.clip(np.rint(groups / s), -top, top - 1) * s - groups) ** 2).mean(1)
            for s in (extreme / d for d in (*-steps, *steps))
        ],
        axis=0,
    )
    assert found < {4: 1.04, 5: 1.1}[scheme.bits] * finest.mean(), "an exhaustive search is hardly better"


@EVERY
def test_groups_are_independent(scheme: Storage) -> None:
    weight = normal(48, 160)
    order = np.random.default_rng(1).permutation(5)
    moved = weight.reshape(48, 5, 32)[:, order].reshape(48, 160)
    q_weight, q_scale = pack(weight, scheme)
    other_weight, other_scale = pack(moved, scheme)
    parts = q_weight.shape[1] // 5 if scheme.layout == "row" else 1
    expected = q_weight.reshape(len(q_weight), 5, parts, -1)[:, order].reshape(q_weight.shape)
    assert np.array_equal(other_weight, expected)
    assert np.array_equal(other_scale, q_scale[:, order])


@EVERY
@pytest.mark.parametrize("block", [32, 1 << 11, 1 << 20])
def test_block_size_changes_no_bit(scheme: Storage, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(101, 300)
    expected = pack(weight, scheme)
    monkeypatch.setattr(packing, "BLOCK", block)
    found = pack(weight, scheme)
    assert [part.tobytes() for part in found] == [part.tobytes() for part in expected]


@EVERY
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_widened_exactly(scheme: Storage, dtype: str) -> None:
    weight = normal(20, 90) * np.float32(0.01)
    narrowed: Array
    if dtype == "bfloat16":
        narrowed = (weight.view(np.uint32) >> 16).astype(np.uint16)
        wide = (narrowed.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float16":
        narrowed = weight.astype(np.float16)
        wide = narrowed.astype(np.float32)
    else:
        with pytest.raises(TypeError, match="cannot pack float64"):
            pack(weight.astype(np.float64), scheme)
        return
    expected, found = pack(wide, scheme), pack(narrowed, scheme)
    assert [part.tobytes() for part in found] == [part.tobytes() for part in expected]


def test_widening_is_exact_for_every_half() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    halves = patterns.view(np.float16)
    out = np.empty(halves.shape, np.float32)
    finite = np.isfinite(halves)
    for part in (halves, halves[finite], halves[np.abs(halves) < 1e-4]):
        floats.widen(part, out[: part.size])
        assert np.array_equal(out[: part.size], part.astype(np.float32), equal_nan=True)
    signs = out[:1].copy()
    floats.widen(np.array([-0.0], np.float16), signs)
    assert np.signbit(signs[0])
    brain = np.empty(1 << 16, np.float32)
    floats.widen(patterns, brain)
    assert np.array_equal(brain.view(np.uint32), patterns.astype(np.uint32) << 16)


def unit(scheme: Storage) -> int:
    """The largest weight of a group whose scale is 1 (x16: -1)."""
    return {4: 8, 5: 16, 8: 128 - (scheme.layout == "row")}[scheme.bits]


GOLDEN = {
    # w = -7, -6 ... 8, twice: scale 1, so q counts from 0 to 15.
    "q4": ([i % 16 - 7 for i in range(32)], "1032547698badcfe" * 2),
    # w = -127, -126 ...: scale 1, q counts from 0.
    "q8": ([i - 127 for i in range(32)], bytes(range(32)).hex()),
}


@pytest.mark.parametrize("scheme", [s for s in QUANTIZED if s.layout == "row"], ids=lambda s: s.name)
def test_golden_bytes_of_row(scheme: Storage) -> None:
    weight, expected = GOLDEN[scheme.name[:2]]
    q_weight, q_scale = pack(np.array([weight], np.float32), scheme)
    assert q_weight.dtype == np.uint32
    assert q_weight.tobytes().hex() == expected
    assert q_scale.tobytes().hex() == {"float16": "003c", "float32": "0000803f"}[scheme.dtype]


def test_golden_bytes_of_x16() -> None:
    # Row 1 holds -8 ... 7 twice: scale 1, q = 0 ... 15 in both halves. The other rows are padding: q 8.
    weight = np.zeros((2, 32), np.float32)
    weight[1] = [i % 16 - 8 for i in range(32)]
    q_weight, q_scale = pack(weight, SCHEMES["q4a8_1"])
    assert (q_weight.shape, q_scale.shape) == ((1, 1, 256), (1, 1, 16))
    rows = q_weight.reshape(4, 16, 4)
    assert [part.tobytes().hex() for part in rows[:, 1]] == ["00112233", "44556677", "8899aabb", "ccddeeff"]
    assert (np.delete(rows, 1, axis=1) == 0x88).all()
    assert q_scale.tobytes().hex() == "0100003c" + "0100" * 14


def test_golden_bytes_of_x16_with_5_bits() -> None:
    # Row 1 holds -16 ... 15: scale 1, q = 0 ... 31. The other rows are padding: q 16.
    weight = np.zeros((2, 32), np.float32)
    weight[1] = np.arange(32) - 16
    q_weight, q_scale = pack(weight, SCHEMES["q5a8_1"])
    assert (q_weight.shape, q_scale.shape) == ((1, 1, 320), (1, 1, 16))
    rows = q_weight.reshape(5, 16, 4)
    nibbles = ["00112233", "44556677", "8899aabb", "ccddeeff"]
    assert [part.tobytes().hex() for part in rows[:, 1]] == [*nibbles, "f0f0f0f0"]
    assert (np.delete(rows[:4], 1, axis=1) == 0).all() and (np.delete(rows[4], 1, axis=0) == 0xFF).all()
    assert q_scale.tobytes().hex() == "0100003c" + "0100" * 14


def test_golden_bytes_of_x16_with_8_bits() -> None:
    # Row 1 holds -128 ... -97: scale 1, q = 0 ... 31. The other rows are padding: q 128.
    weight = np.zeros((2, 32), np.float32)
    weight[1] = np.arange(32) - 128
    q_weight, q_scale = pack(weight, SCHEMES["q8a8_1"])
    assert (q_weight.shape, q_scale.shape) == ((1, 1, 512), (1, 1, 16))
    rows = q_weight.reshape(8, 16, 4)
    assert rows[:, 1].tobytes() == bytes(range(32))
    assert (np.delete(rows, 1, axis=1) == 0x80).all()
    assert q_scale.tobytes().hex() == "0100003c" + "0100" * 14


def test_x16_takes_the_positive_one_of_two_equal_extremes() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :2] = -4, 4
    q_weight, q_scale = pack(weight, SCHEMES["q8a8_1"])
    assert q_scale[0, 0, 0] == -1 / 32
    assert unpack((q_weight, q_scale), SCHEMES["q8a8_1"], (1, 32))[0, :3].tolist() == [-4 + 1 / 32, 4, 0]


@EVERY
def test_zeros_negative_zeros_and_padding_decode_to_zero(scheme: Storage) -> None:
    weight = np.full((17, 40), -0.0, np.float32)
    weight[3] = unit(scheme)
    q_weight, q_scale = pack(weight, scheme)
    whole = unpack((q_weight, q_scale), scheme, (32 if scheme.layout == "x16" else 17, 64))
    assert (whole[3, :40] == unit(scheme)).all()
    whole[3, :40] = 0
    assert not whole.any()
    assert not np.signbit(q_scale[q_scale == 0]).any()


@EVERY
def test_a_group_whose_scale_underflows_becomes_zero_or_multiples_of_the_least(scheme: Storage) -> None:
    weight = np.full((1, 64), unit(scheme), np.float32)
    weight[0, :32] = 1e-7 if scheme.dtype == "float16" else 1e-45
    q_weight, q_scale = pack(weight, scheme)
    found = unpack((q_weight, q_scale), scheme, (1, 64))
    if scheme.layout == "x16":
        assert (q_scale != 0).all() and (found[0, :32] == 2.0**-23).all()  # 1.7 * 2**-24
    else:
        assert (found[0, :32] == 0).all()
    assert (found[0, 32:] == unit(scheme)).all()


@EVERY
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_not_finite_weights_are_refused(scheme: Storage, value: float, dtype: type[np.float32]) -> None:
    weight = np.ones((20, 64), dtype)
    weight[17, 40] = value
    with pytest.raises(CheckpointError, match=r"^lm_head: it holds infinite or NaN weights.*repair"):
        pack(weight, scheme, "lm_head")


@EVERY
def test_a_scale_beyond_float16_is_refused(scheme: Storage) -> None:
    weight = np.full((1, 32), 65520 * unit(scheme), np.float32)
    if scheme.dtype == "float32":
        pack(weight, scheme)
        return
    with pytest.raises(
        CheckpointError, match=r"^embed: it holds weights that need a scale of 65520, beyond.*q0f32"
    ):
        pack(weight, scheme, "embed")
    pack(weight * np.float32(0.999), scheme)


PARAMS = (
    Param("embed.weight", (100, 64)),
    Param("layers.0.attn_norm.weight", (64,)),
    Param("layers.0.attn.qkv.weight", (96, 64)),
    Param("layers.0.attn.qkv.bias", (96,)),
    Param("lm_head.weight", (100, 64)),
)


def mixed(*overrides: tuple[str, str]) -> Storage:
    return replace(SCHEMES["q4f16_1"], overrides=tuple((match, SCHEMES[name]) for match, name in overrides))


def test_overrides_decide_in_order() -> None:
    scheme = mixed(("embed | lm_head", "q8f32_1"), ("*.qkv.weight", "q4a8_1"), ("*", "q0f32"))
    assert [
        (tensor.name, tensor.dtype, tensor.layout) for tensor in quant.stored_parameters(PARAMS, scheme)
    ] == [
        ("embed.q_weight", "uint32", "row"),
        ("embed.q_scale", "float32", "row"),
        ("layers.0.attn_norm.weight", "float32", "plain"),
        ("layers.0.attn.qkv.q_weight", "uint8", "x16"),
        ("layers.0.attn.qkv.q_scale", "float16", "x16"),
        ("layers.0.attn.qkv.bias", "float32", "plain"),
        ("lm_head.q_weight", "uint32", "row"),
        ("lm_head.q_scale", "float32", "row"),
    ]
    assert quant.check_overrides(scheme, PARAMS) == ()


def test_overrides_without_effect_are_reported() -> None:
    found = quant.check_overrides(mixed(("lmhead", "q0f16"), ("lm_*", "q0f16"), ("lm_head", "q0f32")), PARAMS)
    assert len(found) == 2
    assert "the override 'lmhead' matches no parameter of the model; did you mean 'lm_head'?" in found[0]
    assert "the override 'lm_head' has no effect, because earlier overrides match all it matches" in found[1]


def test_sizes() -> None:
    matrix = (Param("a.weight", (32, 64)),)
    bits = {name: quant.stored_bytes(matrix, scheme) / 256 for name, scheme in SCHEMES.items()}
    assert bits == {
        "q0f32": 32, "q0f16": 16, "q4f32_1": 5, "q4f16_1": 4.5, "q8f32_1": 9, "q8f16_1": 8.5, "q4a8_1": 4.5,
        "q5a8_1": 5.5, "q8a8_1": 8.5,
    }  # fmt: skip
    # One row, one column: padded to a tile of 16 rows and a group of 32.
    assert quant.stored_bytes((Param("a.weight", (1, 1)),), SCHEMES["q4a8_1"]) == 256 + 32
    assert quant.stored_bytes(PARAMS, SCHEMES["q0f16"]) == 2 * (100 * 64 * 2 + 64 + 96 * 64 + 96)


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), mixed(("a|b", "q0f32"), ("c", "q4a8_1"))])
def test_json_round_trip(scheme: Storage) -> None:
    value = quant.to_json(scheme)
    assert quant.from_json(value) == scheme
    assert canonical(value)


def changed(**fields: Json) -> Json:
    return {**quant.to_json(SCHEMES["q4f16_1"]), **fields}


def nested(match: str, scheme: Json) -> Json:
    return changed(overrides=[{"match": match, "scheme": scheme}])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("q4f16_1", "a scheme must be a JSON object, found 'q4f16_1'"),
        ({"name": "x"}, "missing or unknown: activation_bits, format"),
        (changed(zero=1), "missing or unknown: zero"),
        (changed(name=4), "name, format and layout must be strings"),
        (changed(format="q3f16"), "format 'q3f16' does not exist; did you mean 'q[48]f16'"),
        (changed(layout="x16"), "format 'q4f16' cannot be stored in layout 'x16', which .*; it has: row;"),
        (changed(activation_bits=4), "activation_bits must be 0 or 8, found 4"),
        (changed(overrides=[{"match": "a"}]), "an override has the fields match and scheme"),
        (nested("a", nested("b", changed())), "the override 'a' has overrides of its own; flatten them"),
    ],
)  # fmt: skip
def test_json_that_is_no_scheme(value: Json, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        quant.from_json(value)


def test_importing_the_module_loads_no_numpy() -> None:
    code = "import sys, mlcbuild.quant; sys.exit(any(name in sys.modules for name in ('numpy', 'tvm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
