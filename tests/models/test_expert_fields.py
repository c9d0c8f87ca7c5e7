"""Tests of the fields of config.json that families with experts, and with latent attention, share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlcbuild.errors import CheckpointError
from mlcbuild.models import expert_fields, latent_fields
from mlcbuild.models.experts import Experts, Router
from mlcbuild.models.fields import Fields
from mlcbuild.models.parsing import parse
from mlcbuild.models.rotary import yarn_attention
from tests.models.test_defaults import written

COMMON: Any = SimpleNamespace(
    feed_forward=SimpleNamespace(activation="silu"),
    attention=SimpleNamespace(heads=4, kv_heads=4, head_dim=16),
)
ROUTER = Router("softmax")


def experts(defaults: tuple[int | None, int | None, int | None] = (None, None, None), **values: Any) -> Any:
    fields = Fields("config.json", values)
    return expert_fields.read_experts(fields, COMMON, ROUTER, defaults=defaults), "\n".join(fields.problems)


@pytest.mark.parametrize("name", expert_fields.COUNTS)
def test_the_number_of_experts_has_three_names(name: str) -> None:
    values: dict[str, Any] = {name: 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    result, problems = experts(**values)
    assert result == Experts(8, 2, 64, "silu", ROUTER) and not problems


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_experts": 8, "n_routed_experts": 4}, "n_routed_experts: must be num_experts 8, found 4"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "must be at most num_experts 2, found 3"),
        ({"num_experts": 2}, "num_experts_per_tok"),
    ],
)
def test_numbers_that_contradict(values: dict[str, Any], words: str) -> None:
    assert words in experts(moe_intermediate_size=64, **values)[1]


def test_absent_numbers_have_the_family_s_defaults() -> None:
    assert experts((16, 4, 32))[0] == Experts(16, 4, 32, "silu", ROUTER)


def test_dots_states_how_experts_are_chosen() -> None:
    values = written("dots1")
    published = {"moe_layer_freq": 1, "scoring_func": "noaux_tc", "topk_method": "noaux_tc"}
    assert parse(values | published) == parse(values)
    with pytest.raises(CheckpointError, match=r'scoring_func: family .* found "softmax"'):
        parse(values | {"scoring_func": "softmax"})


def test_which_layers_have_experts() -> None:
    def by_step(**values: Any) -> tuple[list[int], list[str]]:
        fields = Fields("config.json", values)
        sparse = expert_fields.layers_by_step(fields, 6)
        return [i for i, has_experts in enumerate(sparse) if has_experts], fields.problems

    assert by_step() == ([0, 1, 2, 3, 4, 5], [])
    assert by_step(decoder_sparse_step=2) == ([1, 3, 5], [])
    assert by_step(decoder_sparse_step=3, mlp_only_layers=[5]) == ([2], [])
    for listed in ([6], [True], "x"):
        assert "must list layers from 0 to 5" in by_step(mlp_only_layers=listed)[1][0]
    after = expert_fields.layers_after(Fields("config.json", {"first_k_dense_replace": 2}), 4, 0)
    assert after == (False, False, True, True)
    assert expert_fields.layers_after(Fields("config.json", {}), 2, 1) == (False, True)


def test_a_grouped_router_has_groups_and_a_correction() -> None:
    values = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": False}
    router = expert_fields.grouped_router(Fields("config.json", values), True)
    assert (router.groups, router.groups_kept, router.scale, router.normalized) == (4, 2, 2.5, False)
    assert router.correction and expert_fields.grouped_router(Fields("config.json", {}), True).normalized


def latent(**values: Any) -> tuple[Any, str]:
    fields = Fields("config.json", values)
    return latent_fields.read_latent(fields, COMMON, (512, 0, 128, 64)), "\n".join(fields.problems)


def test_latent_attention_scales_by_both_parts_of_a_head() -> None:
    block, problems = latent(qk_nope_head_dim=32, v_head_dim=24, kv_lora_rank=40, q_lora_rank=20)
    assert not problems and (block.latent, block.query_latent) == (40, 20)
    assert (block.head_dim, block.rope_dim, block.value_dim) == (32, 16, 24)
    assert block.scale == pytest.approx((32 + 16) ** -0.5)
    assert latent()[0].query_latent == 0
    assert "must be 144, the sum of both parts, found 100" in latent(qk_head_dim=100)[1]


@pytest.mark.parametrize(("factor", "weight"), [(40.0, 1.0), (40.0, 0.5), (1.0, 1.0), (40.0, 0.0)])
def test_yarn_raises_the_scale_of_latent_attention(factor: float, weight: float) -> None:
    """Checks the scale of attention scores in DeepSeek models with YaRN. For factors above 1 it is multiplied
    by the square of 0.1 * weight * ln(factor) + 1, where factor and weight (mscale_all_dim) are fields of
    rope_scaling; otherwise it is unchanged."""
    scaling = {"type": "yarn", "factor": factor, "mscale_all_dim": weight}
    actual = latent(rope_scaling=scaling)[0].scale / latent()[0].scale
    assert latent(rope_scaling=scaling | {"rope_type": None}) == latent(rope_scaling=scaling)
    expected = 0.1 * weight * np.log(factor) + 1 if factor > 1 and weight else 1.0
    assert actual == pytest.approx(expected**2) and yarn_attention(40.0, None, None) > 1


@pytest.mark.parametrize("weight", [10**400, 1e308, float("nan"), True, "1"])
def test_a_weight_of_yarn_out_of_range_raises_no_other_error(weight: object) -> None:
    """Checks values of mscale_all_dim that the code which reads rotary embeddings refuses afterwards."""
    latent(rope_scaling={"type": "yarn", "factor": 40.0, "mscale_all_dim": weight})
