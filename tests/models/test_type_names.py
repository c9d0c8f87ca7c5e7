"""Tests of the names and the order of rows of checkpoint tensors: prefixes, reordered rows, and parts that a
text model leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlcbuild.checkpoints import exact_weights
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.row_reader import ParameterSource, Rows
from mlcbuild.errors import CheckpointError
from mlcbuild.models import Param, Piece, TensorNames, parameters, parsing, surplus
from mlcbuild.models.parsing import parse
from mlcbuild.models.tensor_names import other_names
from tests import typegoldens
from tests.checkpoint_files import HF, entry, save, single, tensors


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
def test_a_further_layer_that_drafts_is_left_out(name: str) -> None:
    config = parse(typegoldens.CONFIGS[name])
    unused = parsing.tensor_names(config).unused
    assert surplus(config, "model.layers.3.eh_proj.weight", unused) is not None
    assert surplus(config, "model.layers.4.eh_proj.weight", unused) is None
    assert surplus(config, "model.layers.2.eh_proj.weight", unused) is None


def test_a_piece_with_rows_in_another_order_is_json() -> None:
    names = TensorNames({"a": (Piece("x", 6, 4, ((0, 4, 2), (3, 4, 1))), Piece("y", 2))}, unused="z[.]bias")
    assert TensorNames.from_json(names.to_json()) == names
    assert names.sources["a"][0].taken == [0, 2, 3] and names.sources["a"][0].stored_rows == 8
    assert TensorNames.from_json({"sources": {"a": [["x", 6]]}}) == TensorNames({"a": (Piece("x", 6),)})
    turned = Piece("x", 6, 4, ((0, 4, 1),), ((0, 6, 2), (1, 6, 2)), transposed=True)
    for piece in (turned, Piece("x", 6), Piece("x", 6, columns=((1, 4, 1),))):
        assert Piece.from_json(piece.to_json()) == piece
    assert turned.to_json() == ["x", 6, 4, [[0, 4, 1]], [[0, 6, 2], [1, 6, 2]], True]


@pytest.mark.parametrize(
    "stored",
    [
        ["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"],
        ["model.language_model.embed_tokens.weight", "lm_head.weight"],
        ["embed_tokens.weight", "lm_head.weight"],
    ],
)
def test_a_text_model_may_have_another_prefix(stored: list[str]) -> None:
    sources = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    others = other_names(sources, stored)
    assert [others.get(name, name) for name in stored] == [sources[0], sources[2]]
    assert other_names(sources, sources) == {}


def test_a_checkpoint_without_the_usual_prefix_has_the_same_weights(tmp_path: Path) -> None:
    config = parse({**HF, "tie_word_embeddings": True})
    usual = {name: values for name, values in tensors(config=config).items() if name != "lm_head.weight"}
    short = {name.removeprefix("model."): values for name, values in usual.items()}
    names = parsing.tensor_names(config)
    first, second = (
        exact_weights.checkpoint(single(tmp_path / kind, content), config, names)
        for kind, content in (("usual", usual), ("short", short))
    )
    assert all(np.array_equal(first[param.name], second[param.name]) for param in parameters(config))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_rows_that_are_columns_of_a_tensor_are_read_in_any_part(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    stored = rng.integers(-64, 64, (3, 4, 10)).astype(np.float32)
    save(tmp_path / "x.safetensors", {"x": entry(stored, dtype)})
    (tensor,) = read_header(tmp_path / "x.safetensors").tensors
    ranges = ((0, 10, 2), (1, 10, 2))
    piece = Piece("x", 30, 4, ((0, 4, 1),), ranges, transposed=True)
    joined = replace(tensor, shape=(12, 10))
    source = ParameterSource(Param("layers.0.mlp.experts.gate_up.weight", (3, 10, 4)), (joined,), (piece,))
    expected = stored[..., [*range(0, 10, 2), *range(1, 10, 2)]].swapaxes(1, 2).reshape(30, 4)
    with Rows() as rows:
        for start, stop in ((0, 30), (0, 3), (4, 6), (8, 23), (29, 30)):
            assert np.array_equal(rows.wide(source, start, stop), expected[start:stop])


def test_a_transposed_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    typegoldens.load("gpt_oss", tmp_path)
    config = parse({**typegoldens.CONFIGS["gpt_oss"], "intermediate_size": 41})
    with pytest.raises(CheckpointError) as caught:
        exact_weights.checkpoint(tmp_path, config, parsing.tensor_names(config))
    lines = str(caught.value).splitlines()
    assert sum("must have the shape [5, 36, 82]" in line for line in lines) == 3
    assert sum("must have the shape [5, 41, 36]" in line for line in lines) == 3


def test_parts_without_text_are_left_out_by_name_and_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typegoldens.load("mistral3", tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert "left out: 1 of vision_tower.patch_conv.weight: vision_tower takes no part in text" in lines
    assert all(line.startswith("left out: ") for line in lines)
    config = parse(HF)
    assert surplus(config, "mtp.layers.0.mlp.down_proj.weight") == "mtp takes no part in text"
    assert surplus(config, "model.layers.0.mtp.weight") is None
    assert "do not read it" in (surplus(config, "x.bias", "x[.]bias") or "")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"text_config": 3}, "text_config: must be an object, found 3"),
        (
            "gemma3",
            {"text_config": {"model_type": "llama"}},
            'text_config.model_type: must be gemma3_text, found "llama"',
        ),
        ("gemma3", {"text_config": {"x": 1}}, "text_config.x: unknown to family 'gemma3_text'"),
        (
            "gemma3",
            {"text_config": {**typegoldens.CONFIGS["gemma3"]["text_config"], "final_logit_softcapping": 3.0}},
            "text_config.final_logit_softcapping: must be null: beside a vision tower",
        ),
        ("gemma3", {"zeta": 1}, "zeta: unknown to family 'gemma3'"),
        ("gptj", {"hidden_size": 40}, "hidden_size: is 40, but n_embd is 36; keep one"),
        ("gptj", {"n_layer": 0}, "n_layer: must be an integer from 1"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: must be a list of 3 times 0 or 1, found"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before: family 'opt' supports only true"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm: family 'opt' supports only"),
        ("opt", {"word_embed_proj_dim": 20}, "word_embed_proj_dim: family 'opt' supports only null or 36"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm: family 'bloom' supports only false",
        ),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn: two norms need parallel_attn"),
        ("cohere", {"hidden_act": "xielu"}, "layers.0: xielu has no form with gates"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "dynamic scaling changes with the length",
        ),
        ("hunyuan_v1_moe", {"moe_topk": [1]}, "moe_topk: must list 2 integers from 1 to 4194304, found"),
        (
            "hunyuan_v1_moe",
            {"moe_intermediate_size": [40, 41]},
            "moe_intermediate_size: must be 40 for every",
        ),
        ("hunyuan_v1_moe", {"use_mla": True}, "use_mla: family 'hunyuan_v1_moe' supports only false"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm: family 'hunyuan_v1_dense' supports only"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block: family 'cohere2' supports only true"),
        ("internlm3", {"bias": False}, "bias: must be equal to qkv_bias"),
        ("gpt_oss", {"rope_parameters": None}, "rope_scaling: missing; give the scaling"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token: family 'gpt_oss' supports only null or 2"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier: must be a number above 0"),
    ],
)
def test_refusals_say_what_is_wrong(name: str, changes: typegoldens.Config, message: str) -> None:
    values = typegoldens.CONFIGS[name]
    parse(values)
    with pytest.raises(CheckpointError, match=message):
        parse({**values, **changes})


def test_gemma_may_name_its_activation_twice_if_both_are_the_same() -> None:
    values = typegoldens.CONFIGS["gemma"] | {"hidden_act": "gelu"}
    assert parse(values | {"hidden_activation": "gelu_pytorch_tanh"}) == parse(values)
    for act, activation in (("silu", "gelu_pytorch_tanh"), ("gelu", "gelu")):
        with pytest.raises(CheckpointError, match="hidden_activation: family 'gemma' supports only null"):
            parse(values | {"hidden_act": act, "hidden_activation": activation})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bloom", {"attention_softmax_in_fp32": True, "masked_softmax_fusion": True}),
        ("cohere2", {"layer_switch": 4, "use_embedding_sharing": True, "use_gated_activation": True}),
        ("cohere2", {"use_parallel_block": True, "use_parallel_embedding": False}),
        ("falcon", {"ff_factor": 4}),
        ("gpt_neox", {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}),
        ("hunyuan_v1_dense", {"cla_share_factor": 2, "dense_list": [4096, 0], "norm_type": "rms"}),
        ("hunyuan_v1_dense", {"mask_init_id": 12, "pad_id": 3, "use_cla": False, "use_qk_norm": True}),
        ("hunyuan_v1_moe", {"mask_init_id": 12, "pad_id": 3, "use_rotary_pos_emb": True}),
        ("hunyuan_v1_moe", {"routed_scaling_factor": False, "n_group": False, "topk_group": False}),
        ("hunyuan_v1_moe", {"vit_mapping_type": "resampler", "vit_path": None, "vit_token": 64}),
        ("hunyuan_v1_moe", {"anyres_vit_two_views": False, "image_token_id": 9, "video_start_id": 8}),
        ("minimax_m2", {"layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1}),
        ("smollm3", {"max_window_layers": 28}),
        ("starcoder2", {"activation_function": "gelu", "layer_norm_epsilon": 1e-5}),
        ("starcoder2", {"scale_attention_softmax_in_fp32": True, "scale_attn_weights": True}),
    ],
)
def test_fields_of_published_models_that_transformers_ignores(name: str, changes: typegoldens.Config) -> None:
    values = typegoldens.CONFIGS[name]
    assert parse({**values, **changes}) == parse(values)


@pytest.mark.parametrize(
    ("name", "spelling"), [("phimoe", "PhiMoEForCausalLM"), ("ernie4_5", "Ernie4_5_ForCausalLM")]
)
def test_architectures_may_name_the_class_as_the_checkpoints_own_code_does(name: str, spelling: str) -> None:
    values = typegoldens.CONFIGS[name]
    assert parse({**values, "architectures": [spelling]}) == parse(values)
    for other in (["PhiForCausalLM"], [spelling, spelling], [3], spelling):
        with pytest.raises(CheckpointError, match="architectures: must be"):
            parse({**values, "architectures": other})


def test_hunyuan_has_two_names_for_the_size_of_a_head() -> None:
    values = typegoldens.CONFIGS["hunyuan_v1_dense"]
    size = parse(values).layers[0].mixer.head_dim
    assert parse({**values, "attention_head_dim": size, "head_dim": size}) == parse(values)
    with pytest.raises(CheckpointError, match="attention_head_dim: is 4, but head_dim is 2; keep one"):
        parse({**values, "head_dim": 2, "attention_head_dim": 4})


def test_a_missing_text_model_is_reported_as_missing() -> None:
    with pytest.raises(CheckpointError, match="text_config: must be an object, and is missing"):
        parse({"model_type": "gemma3"})
