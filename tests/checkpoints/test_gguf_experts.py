"""Tests that GGUF files of models with experts and with latent attention are read as the same models as their
checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mlcbuild.bundles.reference import logits
from mlcbuild.checkpoints import exact_weights
from mlcbuild.checkpoints.gguf_config import read_config
from mlcbuild.checkpoints.gguf_experts import EXPERTS, SIGMOID, SOFTMAX, granite_scalars, mixtral, phi_lengths
from mlcbuild.checkpoints.gguf_file import Gguf
from mlcbuild.checkpoints.gguf_keys import Fields, GgufKeys
from mlcbuild.checkpoints.gguf_names import names_in_file
from mlcbuild.checkpoints.gguf_tensors import read_tensors
from mlcbuild.errors import CheckpointError
from mlcbuild.models.fields import ABSENT
from mlcbuild.models.parsing import parse
from tests.conftest import ROOT
from tests.gguf_experts import CHANGES, checkpoint, tokens, write, write_model

GOLDEN = load_file(ROOT / "tests" / "golden" / "gguf-experts.safetensors")
FORMS = [
    *((name, "") for name in CHANGES),
    ("qwen2_moe", "fused"),
    ("mixtral", "apart"),
    ("deepseek_v3", "mha"),
]
"""(name of a test model, form of its GGUF file) of each case: "" as llama.cpp's converter writes it now,
"fused" as it may write it, "apart" and "mha" as earlier versions wrote it."""


def own_logits(path: Path) -> NDArray[Any]:
    config = read_config(path)
    values = exact_weights.checkpoint(path, config, names_in_file(path, config))
    return np.asarray(logits(config, values, [int(token) for token in tokens(path.stem)]))


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_logits_are_those_of_transformers(name: str, form: str, tmp_path: Path) -> None:
    write(name, tmp_path / f"{name}.gguf", form=form)
    computed, expected = own_logits(tmp_path / f"{name}.gguf"), GOLDEN[name]
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-5 * np.ptp(expected))


@pytest.mark.parametrize("name", CHANGES)
def test_the_config_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "m.gguf")
    assert read_config(tmp_path / "m.gguf") == parse(checkpoint(name)[0])


def test_what_files_leave_out(tmp_path: Path) -> None:
    """Checks values that are derived from the tensors of a GGUF file if its metadata omit them: routers use
    the sigmoid if the file has tensors that correct their scores, and the layers before the first router have
    no experts."""
    left_out = {"expert_gating_func": None, "leading_dense_block_count": None, "expert_group_count": 3}
    write_model(*checkpoint("deepseek_v3"), tmp_path / "m.gguf", changes=left_out)
    assert read_config(tmp_path / "m.gguf") == parse(checkpoint("deepseek_v3")[0])


def test_the_rope_of_hunyuan_is_scaled_by_the_converter(tmp_path: Path) -> None:
    """Checks rotary embeddings of HunYuan models. llama.cpp's converter replaces the field `alpha` by an
    increased base; a GGUF file with this base is read with the frequencies of the config.json with
    `alpha`."""
    config, tensors = checkpoint("hunyuan_v1_moe")
    alpha = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    original = parse({**config, "rope_theta": 10000.0, "rope_scaling": alpha})
    changes = {"rope.freq_base": 10000.0 * 1000.0 ** (10 / 8), "rope.scaling.original_context_length": 262144}
    write_model(config, tensors, tmp_path / "m.gguf", changes=changes)
    (rope,), (expected,) = read_config(tmp_path / "m.gguf").ropes, original.ropes
    np.testing.assert_allclose(rope.inv_freq, expected.inv_freq, rtol=3e-7)


def test_layers_for_drafts_are_left_out(tmp_path: Path) -> None:
    """Checks that layers for draft tokens, which GGUF files count among the model's layers, are left out."""
    config, tensors = checkpoint("glm4_moe")
    draft = {"blk.3.nextn.enorm.weight": np.ones(36, np.float32)}
    changes = {"block_count": 4, "nextn_predict_layers": 1}
    write_model(config, tensors, tmp_path / "glm4_moe.gguf", changes=changes, more=draft)
    expected = GOLDEN["glm4_moe"]
    computed = own_logits(tmp_path / "glm4_moe.gguf")
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-5 * np.ptp(expected))


@pytest.mark.parametrize("stated", [None, 6])
def test_heads_are_rotated_as_the_file_says(tmp_path: Path, stated: int | None) -> None:
    config, tensors = checkpoint("glm4_moe")
    changes = {"rope.dimension_count": stated, "attention.key_length": 6}
    write_model(config | {"head_dim": 6}, tensors, tmp_path / "m.gguf", changes=changes)
    assert read_config(tmp_path / "m.gguf").ropes[0].dim == 6


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "count": (
        "olmoe",
        {"expert_count": 8},
        "olmoe.expert_count: is 8, but tensor 'blk.0.ffn_down_exps.weight' holds 7 experts; use",
    ),
    "chosen": (
        "olmoe",
        {"expert_used_count": 8},
        "num_experts_per_tok: must be at most num_experts 7, found 8",
    ),
    "negative": (
        "glm4_moe",
        {"nextn_predict_layers": -1},
        "glm4moe.nextn_predict_layers must be an integer of at least 0: found '-1'; fetch the file again",
    ),
    "flag": (
        "dots1",
        {"expert_weights_norm": 3},
        "dots1.expert_weights_norm must be true or false: found '3'; fetch the file again",
    ),
    "softmax": (
        "dots1",
        {"expert_gating_func": 1},
        "dots1.expert_gating_func: must be 2 (sigmoid) for this architecture, not 1; use the original check",
    ),
    "other": (
        "deepseek_v3",
        {"expert_gating_func": 3},
        "deepseek2.expert_gating_func: must be 1 (softmax) or 2 (sigmoid), not 3; use the original chec",
    ),
    "shared": (
        "ernie4_5_moe",
        {"expert_shared_count": 3},
        "ernie4_5-moe.expert_shared_count: must be 2, as the tensors have it; use the original checkpoint",
    ),
    "shared size": (
        "hunyuan_v1_moe",
        {"expert_shared_feed_forward_length": 41},
        "hunyuan-moe.expert_shared_feed_forward_length: must be 40, like feed_forward_length; use the orig",
    ),
    "layers": (
        "ernie4_5_moe",
        {"block_count": (1 << 32) - 1},
        "num_hidden_layers: must be an integer from 1 to 4096, found 4294967295",
    ),
    "latent": (
        "deepseek_v2",
        {"attention.kv_lora_rank": None},
        "deepseek2.attention.kv_lora_rank must be an integer above 0: it is missing; fetch the file again",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_metadata_that_describe_no_model(case: str, tmp_path: Path) -> None:
    name, changes, sentence = FAULTS[case]
    write_model(*checkpoint(name), tmp_path / "m.gguf", changes=changes)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path / "m.gguf")
    assert str(caught.value).startswith(f"{tmp_path / 'm.gguf'}: {sentence}")
    assert "\n" not in str(caught.value)


def test_a_stack_that_is_none(tmp_path: Path) -> None:
    flat = {"blk.9.ffn_up_exps.weight": np.ones((4, 6), np.float32)}
    write_model(*checkpoint("olmoe"), tmp_path / "m.gguf", more=flat)
    with pytest.raises(CheckpointError) as caught:
        read_tensors(tmp_path / "m.gguf")
    assert str(caught.value) == (
        f"{tmp_path / 'm.gguf'}: tensor 'blk.9.ffn_up_exps.weight' must be a stack of at most 4096 matrices, "
        "found the shape [4, 6]; fetch the file again"
    )


def keys(architecture: str, *tensors: str, shape: tuple[int, ...] = (4, 8, 16), **metadata: Any) -> GgufKeys:
    """Returns the metadata and tensor list of a GGUF file of a model with 4 experts, 2 of which a token uses.
    metadata: further keys without the architecture, with "__" in place of "."; tensors: names of tensors,
    which all have the shape `shape`."""
    values = {"expert_count": 4, "expert_used_count": 2, "block_count": 3, **metadata}
    named = {f"{architecture}.{name.replace('__', '.')}": value for name, value in values.items()}
    held = {name: Tensor(name, "F32", shape, Path(), 0, 0) for name in tensors}
    return GgufKeys(Gguf({"general.architecture": architecture, **named}, held), "m.gguf")


ROUTERS = tuple(f"blk.{layer}.ffn_gate_inp.weight" for layer in (1, 2))
"""GGUF names of the matrices that route tokens to experts, in the second and third layer of a model whose
first layer has no experts."""


def fields(architecture: str, *tensors: str, **metadata: Any) -> Fields:
    """Returns the fields of config.json that are derived from a GGUF file with experts. Fails if its metadata
    are faulty. tensors: names of tensors in the file; metadata: keys without the architecture, with "__" in
    place of "."."""
    own = keys(architecture, *tensors, **metadata)
    actual = EXPERTS[architecture](own)
    own.check()
    return actual


def test_numbers_of_gating_functions_are_those_of_the_package_gguf() -> None:
    kinds = gguf.ExpertGatingFuncType
    assert (SOFTMAX, SIGMOID) == (kinds.SOFTMAX, kinds.SIGMOID)


def test_sizes_that_a_file_leaves_out_are_those_of_dense_layers() -> None:
    assert fields("olmoe", feed_forward_length=24)["intermediate_size"] == 24
    stated = fields("olmoe", feed_forward_length=24, expert_feed_forward_length=8)
    assert stated["intermediate_size"] == 8
    qwen = fields("qwen2moe", *ROUTERS, feed_forward_length=24)
    # An expert has an equal part of the dense size, and the shared one all of it.
    assert (qwen["moe_intermediate_size"], qwen["shared_expert_intermediate_size"]) == (12, 24)
    assert (qwen["mlp_only_layers"], qwen["norm_topk_prob"]) == ([0], False)
    assert fields("qwen3moe", *ROUTERS, feed_forward_length=24)["norm_topk_prob"] is True


def test_the_number_of_experts_is_that_of_the_tensors() -> None:
    stack = "blk.0.ffn_down_exps.weight"
    assert fields("olmoe", stack, feed_forward_length=8)["num_experts"] == 4
    own = keys("olmoe", stack, shape=(5, 8, 16), feed_forward_length=8)
    EXPERTS["olmoe"](own)
    with pytest.raises(CheckpointError, match=r"expert_count: is 4, but tensor '.*' holds 5 experts"):
        own.check()


def test_mixtral_has_the_architecture_llama() -> None:
    actual = mixtral(keys("llama", feed_forward_length=8, attention__sliding_window=0))
    assert (actual["model_type"], actual["num_experts"], actual["num_experts_per_tok"]) == ("mixtral", 4, 2)
    assert (actual["intermediate_size"], actual["sliding_window"]) == (8, None)


def test_leading_dense_layers_are_counted_by_routers() -> None:
    """Checks the number of leading layers without experts that is read from a GGUF file: it counts the layers
    before the first one with a router. For a type that lists layers without experts, all of them are
    listed."""
    for routers, count in ((ROUTERS, 1), (("blk.0.ffn_gate_inp.weight",), 0), (ROUTERS[1:], 2)):
        own = fields("dots1", *routers, "a", "b", feed_forward_length=8)
        assert own["first_k_dense_replace"] == count
    for routers, layers in ((ROUTERS, [0]), (ROUTERS[:1], [0, 2])):
        own = fields("qwen3moe", *routers, "a", "b", feed_forward_length=8)
        assert own["mlp_only_layers"] == layers


def test_groups_and_scales_have_neutral_defaults() -> None:
    plain = fields("glm4moe", *ROUTERS, feed_forward_length=8, nextn_predict_layers=1)
    assert {name: plain[name] for name in ("n_group", "topk_group", "n_shared_experts")} == {
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    }
    assert (plain["routed_scaling_factor"], plain["norm_topk_prob"]) == (1.0, False)
    assert plain["num_hidden_layers"] == 2, "layers for draft tokens are not counted"
    stated = fields(
        "glm4moe",
        "blk.0.attn_q_norm.weight",
        feed_forward_length=8,
        expert_group_count=4,
        expert_group_used_count=2,
        expert_weights_scale=2.5,
        expert_weights_norm=True,
        expert_gating_func=SIGMOID,
    )
    assert (stated["n_group"], stated["topk_group"], stated["routed_scaling_factor"]) == (4, 2, 2.5)
    assert (stated["norm_topk_prob"], stated["use_qk_norm"], plain["use_qk_norm"]) == (True, True, False)


LATENT: dict[str, Any] = {
    "feed_forward_length": 8,
    "attention__head_count": 6,
    "attention__kv_lora_rank": 16,
    "attention__q_lora_rank": 12,
    "attention__key_length": 20,
    "attention__value_length": 10,
    "rope__dimension_count": 4,
}


def test_deepseek_is_the_third_version_if_its_scores_are_sigmoids() -> None:
    cases: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
        ((), {}, "deepseek_v2"),
        (("blk.1.exp_probs_b.bias",), {}, "deepseek_v3"),
        (("blk.1.exp_probs_b.bias",), {"expert_gating_func": SOFTMAX}, "deepseek_v2"),
        ((), {"expert_gating_func": SIGMOID}, "deepseek_v3"),
    )
    for tensors, stated, kind in cases:
        assert fields("deepseek2", *tensors, **LATENT, **stated)["model_type"] == kind
    assert fields("deepseek2", **LATENT)["topk_method"] == "greedy"
    grouped = fields("deepseek2", **LATENT, expert_group_count=2)
    assert grouped["topk_method"] == "group_limited_greedy"


def test_sizes_of_latent_attention_in_both_forms() -> None:
    """Checks the head sizes that are read from GGUF files of models with latent attention, in both forms: one
    states the sizes of every head, the other those of the single head that the cache stores, and the sizes of
    every head under keys of their own."""
    heads = {"attention__key_length_mla": 14, "attention__value_length_mla": 7}
    for stated, (key, value) in (({}, (20, 10)), (heads, (14, 7))):
        actual = fields("deepseek2", **LATENT, **stated)
        assert (actual["qk_nope_head_dim"], actual["v_head_dim"]) == (key - 4, value)
        assert (actual["qk_rope_head_dim"], actual["num_key_value_heads"]) == (4, 6)
        assert (actual["head_dim"], actual["q_lora_rank"], actual["kv_lora_rank"]) == (ABSENT, 12, 16)
    assert fields("deepseek2", "blk.0.attn_q.weight", **LATENT)["q_lora_rank"] is None


def test_multipliers_of_granite() -> None:
    stated = keys("granitemoe", attention__scale=0.5, residual_scale=0.25, embedding_scale=12, logit_scale=6)
    names = ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling")
    assert [granite_scalars(stated)[name] for name in names] == [0.5, 0.25, 12.0, 6.0]
    assert [granite_scalars(keys("granitemoe"))[name] for name in names] == [1.0] * 4
    plain = fields("granitemoe", feed_forward_length=8)
    shared = fields("granitemoe", feed_forward_length=8, expert_shared_feed_forward_length=5)
    assert "model_type" not in plain and shared["model_type"] == "granitemoeshared"
    assert shared["shared_intermediate_size"] == 5


def test_shared_experts_of_ernie_are_those_of_the_tensors() -> None:
    up = "blk.1.ffn_up_shexp.weight"
    stated = {
        "expert_feed_forward_length": 2,
        "feed_forward_length": 8,
        "expert_shared_feed_forward_length": 9,
    }
    actual = fields("ernie4_5-moe", *ROUTERS, up, **stated)
    assert actual["moe_num_shared_experts"] == 2, "4 rows are twice the size of an expert"
    assert (actual["moe_layer_start_index"], actual["moe_layer_end_index"]) == (1, 2)
    assert fields("ernie4_5-moe", *ROUTERS, "a", **stated)["moe_num_shared_experts"] == 0


def test_lengths_of_phi() -> None:
    lengths: dict[str, Any] = {"attention__sliding_window": 64, "rope__scaling__original_context_length": 32}
    assert phi_lengths(keys("phimoe", **lengths)) == {
        "sliding_window": 64,
        "original_max_position_embeddings": 32,
    }
    assert phi_lengths(keys("phimoe")) == {"sliding_window": None}
    actual = fields("phimoe", "output.bias", feed_forward_length=8, **lengths)
    assert (actual["lm_head_bias"], actual["attention_bias"]) == (True, False)
    assert actual["original_max_position_embeddings"] == 32
