"""Tests that any JSON in place of config.json is either understood or refused with a reason."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from mlcbuild import canon, models
from mlcbuild.errors import CheckpointError
from mlcbuild.models import (
    ModelConfig,
    parameters,
    parsing,
)
from mlcbuild.models.parsing import parse
from tests.libharness import EVERY
from tests.models.cases import LLAMA3, LONGROPE, VARIANTS, YARN, Config, golden

NAMES = sorted({name for variant in VARIANTS for name in golden(variant)} | {"rope_parameters", "dtype", "x"})
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        [0, 1, 2, 3, 6, 36, 2**20, 1e-300, 1e300, "yarn", "su", "llama3", "linear", "longrope", "silu"]
    )
)
INNER = sorted(set(LLAMA3) | set(YARN) | set(LONGROPE) | {"type", "mscale", "full_attention", "truncate"})
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=7)
        | st.dictionaries(st.sampled_from(INNER) | st.text(max_size=3), inner, max_size=6)
    ),
    max_leaves=12,
)


def understood_or_refused(values: object) -> None:
    try:
        config = parse(values)
    except CheckpointError as error:
        assert str(error)
        return
    assert isinstance(config, ModelConfig)
    assert models.from_json(json.loads(canon.canonical(models.to_json(config)))) == config
    assert list(parsing.tensor_names(config).sources) == [param.name for param in parameters(config)]


@settings(max_examples=400 if EVERY else 120, deadline=None)
@given(st.sampled_from(VARIANTS), st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=4))
def test_any_change_of_a_config_is_understood_or_refused(variant: str, changes: Config) -> None:
    understood_or_refused(golden(variant) | changes)


@settings(max_examples=300 if EVERY else 100, deadline=None)
@given(
    st.sampled_from(["llama-llama3-gqa", "llama-yarn", "phi3-longrope-long"]),
    st.dictionaries(
        st.sampled_from(INNER),
        LEAVES | st.floats(1e-6, 1e9) | st.lists(st.floats(0, 1e9), min_size=5, max_size=6),
        max_size=5,
    ),
)
def test_any_change_of_a_rope_is_understood_or_refused(variant: str, changes: Config) -> None:
    values = golden(variant)
    name = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    understood_or_refused(values | {name: values[name] | changes})


@settings(max_examples=100 if EVERY else 40, deadline=None)
@given(ANYTHING)
def test_any_json_is_understood_or_refused(values: object) -> None:
    understood_or_refused(values)
    understood_or_refused({"model_type": "llama", "hidden_size": values})
