"""Tests that a manifest with any JSON value in any place is either valid or refused with one sentence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlcbuild_format import bundle
from mlcbuild_format.bundle import Manifest
from mlcbuild_format.fields import FieldError, Json

from . import toy

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON, place=st.integers(0, 200))
@example(value={"\n": None}, place=19)
@example(value={"\n": None}, place=119)
def test_any_value_in_any_place_gives_a_manifest_or_a_sentence(value: Json, place: int) -> None:
    """Checks that a valid manifest in which one value is replaced by any other one is either accepted or
    refused with one sentence."""
    good = sample().to_json()
    places = list(paths(good))
    *parents, last = places[place % len(places)]
    target: Json = good
    for key in parents:
        assert isinstance(target, dict)
        target = target[key]
    assert isinstance(target, dict)
    target[last] = value
    try:
        parsed = bundle.parse(good)
    except FieldError as error:
        assert "\n" not in str(error)
    else:
        assert bundle.parse(json.loads(parsed.to_bytes())) == parsed


def paths(value: Json, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [above]
    inner = [path for key, item in value.items() for path in paths(item, (*above, key))]
    return inner + ([above] if above else [])


FIGURES: dict[str, Json] = {
    "kl_mean": 0.1,
    "kl_max": 0.2,
    "top1_agreement": 1,
    "perplexity": 5.5,
    "reference_perplexity": 5.4,
    "decode_error": 0.0,
    "tokens": 7,
}


def sample() -> Manifest:
    digest = bundle.signature([("table", (260, 4), "float32", "plain")])
    return Manifest(
        name="name",
        model=bundle.Model("toy", "toy", {"vocab_size": 260}),
        scheme={"name": "q0f32"},
        target=toy.TARGET,
        limits=bundle.Limits(256, 32, 4),
        library="model.so",
        weights=("w",),
        signature=digest,
        files={name: bundle.File("0" * 64, 1) for name in ("model.so", "w")},
        memory=bundle.Memory(1, 2, 3, 6),
        serving=bundle.Serving(1, (2,), 0.6, 0.9, 20),
        verification=FIGURES,
        tools={"apache-tvm": "0"},
    )


@pytest.mark.parametrize(
    ("windows", "longest"),
    [([], None), ([None], None), ([7], 7), ([7, 9], 9), ([7, None], None)],
)
def test_the_window_is_that_of_the_layer_with_the_longest_memory(
    windows: list[int | None], longest: int | None
) -> None:
    """Checks which attention window a manifest states: that of the layer with the longest one. A layer
    without a window attends to everything, and a config without layers states nothing."""
    specs: list[Json] = [{"mixer": {} if size is None else {"window": size}} for size in windows]
    config: dict[str, Json] = {"vocab_size": 260, "layer_specs": specs, "layers": [0] * 3}
    manifest = replace(sample(), model=bundle.Model("toy", "toy", config))
    assert (manifest.window, manifest.num_layers) == (longest, 3)
    assert (sample().window, sample().num_layers) == (None, 0)
