"""Tests of the values that fields have which a config.json lacks: those of transformers."""

from __future__ import annotations

import pytest

from mlcbuild.errors import CheckpointError
from mlcbuild.models import ModelConfig
from mlcbuild.models.parsing import family_names, parse
from tests.models.cases import Config, attention
from tests.models.test_known import DEFAULTS

NEEDED: dict[str, Config] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "glm4_moe": {"hidden_size": 6144},
}
"""Model type -> fields that its default config needs to describe a model."""
OWN = {("mistral3", "tie_word_embeddings")}
"""(Model type, field) whose default differs on purpose: transformers 5 ties by default, but reads an output
matrix that a checkpoint has; transformers 4 does not tie."""


def written(family: str) -> Config:
    """Returns config.json as the newest transformers writes it for a model type's default model."""
    newest = DEFAULTS[max(DEFAULTS)]
    values: Config = newest["base"] | newest[family] | NEEDED.get(family, {})
    return values


def without(values: Config, name: str) -> Config:
    return {key: value for key, value in values.items() if key != name}


def understood(values: Config) -> ModelConfig | None:
    """Returns the model that a config.json describes, or None if it is refused."""
    try:
        return parse(values)
    except CheckpointError:
        return None


@pytest.mark.parametrize("family", family_names())
def test_an_absent_field_has_its_default_or_is_missing(family: str) -> None:
    values = written(family)
    config = parse(values)
    cases = {name: without(values, name) for name in values if name not in NEEDED.get(family, {})}
    cases = {name: case for name, case in cases.items() if (family, name) not in OWN}
    ropes = values.get("rope_parameters") or {}
    if ropes.get("rope_type") == "default":
        cases |= {
            f"rope_parameters.{name}": values | {"rope_parameters": without(ropes, name)} for name in ropes
        }
    assert [name for name, case in cases.items() if understood(case) not in (None, config)] == []


@pytest.mark.parametrize("family", ["apertus", "ministral3"])
def test_null_rope_parameters_are_the_family_s(family: str) -> None:
    values = written(family)
    assert parse(values | {"rope_parameters": None}) == parse(values)


@pytest.mark.parametrize("family", ["ernie4_5", "ministral3", "seed_oss"])
def test_a_null_head_size_is_a_share_of_the_hidden_size(family: str) -> None:
    values = written(family) | {"hidden_size": 4096, "num_attention_heads": 64}
    assert attention(parse(without(values, "head_dim"))).head_dim == 128
    assert attention(parse(values | {"head_dim": None})).head_dim == 64


@pytest.mark.parametrize(("family", "count"), [("dots1", 32), ("mixtral", 8), ("qwen2_moe", 16)])
def test_absent_key_value_heads_are_a_number_or_as_many_as_heads(family: str, count: int) -> None:
    values = written(family) | {"num_attention_heads": 64}
    assert attention(parse(without(values, "num_key_value_heads"))).kv_heads == count
    assert attention(parse(values | {"num_key_value_heads": None})).kv_heads == 64
