"""Tests of schemes: overrides, their JSON form, and the sizes of stored tensors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from mlcbuild import quant
from mlcbuild.canon import Json, canonical
from mlcbuild.errors import UsageError
from mlcbuild.models import Param
from mlcbuild.quant import Scheme, Storage, storage
from mlcbuild.quant.schemes import SCHEMES as BUILT_IN
from tests.schemes import SCHEMES

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
    actual = quant.check_overrides(
        mixed(("lmhead", "q0f16"), ("lm_*", "q0f16"), ("lm_head", "q0f32")), PARAMS
    )
    assert len(actual) == 2
    assert "the override 'lmhead' matches no parameter of the model; did you mean 'lm_head'?" in actual[0]
    assert "the override 'lm_head' has no effect, because earlier overrides match all it matches" in actual[1]


def test_sizes() -> None:
    matrix = (Param("a.weight", (32, 256)),)
    bits = {name: quant.stored_bytes(matrix, scheme) / 1024 for name, scheme in SCHEMES.items()}
    assert bits == {
        "q0f32": 32, "q0f16": 16, "q4f32_1": 5, "q4f16_1": 4.5, "q8f32_1": 9, "q8f16_1": 8.5, "q4a8_1": 4.5,
        "q5a8_1": 5.5, "q8a8_1": 8.5, "q3a8_2": 3.5625, "q4a8_2": 4.625, "q5a8_2": 5.625, "q6a8_2": 6.5625,
    }  # fmt: skip
    # One row, one column: padded to a tile of 16 rows and a group of 32.
    assert quant.stored_bytes((Param("a.weight", (1, 1)),), SCHEMES["q4a8_1"]) == 256 + 32
    assert quant.stored_bytes(PARAMS, SCHEMES["q0f16"]) == 2 * (100 * 64 * 2 + 64 + 96 * 64 + 96)


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), mixed(("a|b", "q0f32"), ("c", "q4a8_1"))])
def test_json_round_trip(scheme: Storage) -> None:
    value = quant.to_json(scheme)
    assert quant.from_json(value) == scheme
    assert canonical(value)


def changed(**fields: Any) -> Json:
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
        (changed(activation_bits=False), "activation_bits must be 0 or 8, found False"),
        (changed(activation_bits=8.0), "activation_bits must be 0 or 8, found 8.0"),
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


def test_the_backend_chooses_the_layout_of_overrides_too() -> None:
    scheme = replace(BUILT_IN["q4f16_1"], overrides=(("embed", BUILT_IN["q8a8_1"]),))
    actual = storage(scheme, _layout)
    assert (actual.layout, actual.overrides[0][1].layout) == ("row", "x16")
    assert actual.formats == ("q4f16", "q8s")


def _layout(scheme: Scheme) -> str:
    return "x16" if scheme.activation_bits else "row"


def test_the_description_states_numbers_in_place_of_names() -> None:
    """Checks the JSON description of a scheme. Libraries and manifests contain it, so a change would change
    their bytes."""
    scheme = mixed(("embed", "q8a8_1"))
    assert quant.describe(scheme) == {
        "name": "q4f16_1",
        "bits": 4,
        "group_size": 32,
        "dtype": "float16",
        "layout": "row",
        "activation_bits": 0,
        "overrides": [
            {
                "match": "embed",
                "scheme": {
                    "name": "q8a8_1",
                    "bits": 8,
                    "group_size": 32,
                    "dtype": "float16",
                    "layout": "x16",
                    "activation_bits": 8,
                    "overrides": [],
                },
            }
        ],
    }
