"""Tiny models of each model type: configs, random weights, and the logits that transformers computes.

A golden is one file, tests/golden/<name>.safetensors. It contains the logits of one pass, float32 [n, vocab],
and in its header the names and shapes of the checkpoint's tensors. The weights are not stored: they are
generated again from the golden's name. tests/golden/make_types.py writes the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from mlcbuild.checkpoints import exact_weights
from mlcbuild.models import ModelConfig, parsing
from tests.checkpoint_files import entry, save

HERE = Path(__file__).parent / "golden"
TOKENS, VOCAB, WINDOW = 45, 71, 64
Values = np.ndarray[Any, np.dtype[Any]]
Config = dict[str, Any]


def _sizes(**more: Any) -> Config:
    """Returns the fields of a tiny model's config.json. Its sizes are not multiples of a tile or of a group
    of weights, so that the last ones are filled partly. more: fields to add or to replace."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 36,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": WINDOW,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **more,
    }


def _without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def _rope(theta: float = 10000.0, **more: Any) -> Config:
    return {"rope_type": "default", "rope_theta": theta, **more}


_YARN = _rope(factor=4.0, original_max_position_embeddings=16) | {"rope_type": "yarn"}
_MIXED = ["full_attention", "sliding_attention", "full_attention"]
_VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 36,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": WINDOW,
}
_TYPES: dict[str, Config] = {
    "gemma": _sizes(head_dim=10, tie_word_embeddings=True, hidden_activation=None, hidden_act="gelu"),
    "gemma3_text": _sizes(
        num_hidden_layers=3,
        head_dim=12,
        query_pre_attn_scalar=7,
        sliding_window=9,
        sliding_window_pattern=3,
        rope_theta=30000.0,
        rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        tie_word_embeddings=True,
    ),
    "gemma3": {
        "text_config": _without(
            _sizes(num_hidden_layers=3, head_dim=12, sliding_window=9, layer_types=_MIXED),
            "tie_word_embeddings",
        ),
        "vision_config": _VISION | {"image_size": 8, "patch_size": 4, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "ministral": _sizes(num_hidden_layers=3, head_dim=8, sliding_window=7, layer_types=_MIXED),
    "ministral3": _sizes(
        head_dim=16,
        rope_parameters=_YARN | {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "mistral3": {
        "text_config": _without(_sizes(head_dim=8), "tie_word_embeddings")
        | {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000.0},
        "vision_config": _VISION | {"head_dim": 4, "image_size": 8, "patch_size": 4, "model_type": "pixtral"},
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text_config": _without(_sizes(head_dim=12), "tie_word_embeddings")
        | {"rope_scaling": _rope(5000.0, mrope_section=[2, 2, 2], mrope_interleaved=True)},
        "vision_config": {
            "hidden_size": 8,
            "intermediate_size": 8,
            "depth": 1,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 36,
            "num_position_embeddings": 4,
            "deepstack_visual_indexes": [0],
        },
        "tie_word_embeddings": True,
    },
    "smollm3": _sizes(
        num_hidden_layers=3,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=11,
        attention_bias=True,
        mlp_bias=True,
    ),
    "glm": _sizes(head_dim=12, attention_bias=True),
    "glm4": _sizes(head_dim=16, attention_bias=True, partial_rotary_factor=0.25),
    "ernie4_5": _sizes(head_dim=10, use_bias=True, tie_word_embeddings=True),
    "seed_oss": _sizes(head_dim=10, attention_out_bias=True, mlp_bias=True),
    "exaone4": _sizes(num_hidden_layers=3, sliding_window=9, layer_types=_MIXED),
    "olmo": _without(_sizes(clip_qkv=1.1), "num_key_value_heads"),
    "olmo2": _sizes(attention_bias=True),
    "olmo3": _sizes(
        num_hidden_layers=3,
        sliding_window=9,
        layer_types=_MIXED,
        rope_scaling=_without(_YARN, "rope_theta"),
        rope_theta=500000.0,
    ),
    "granite": _sizes(
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=5.0,
        tie_word_embeddings=True,
    ),
    "cohere": _sizes(use_qk_norm=True, attention_bias=True, logit_scale=0.3, tie_word_embeddings=True),
    "cohere2": _sizes(num_hidden_layers=3, sliding_window=9, sliding_window_pattern=3, logit_scale=0.3),
    "phi": _sizes(qk_layernorm=True, partial_rotary_factor=0.4, hidden_act="gelu_new", hidden_size=60),
    "starcoder2": _sizes(sliding_window=13, tie_word_embeddings=True),
    "stablelm": _sizes(qk_layernorm=True, use_qkv_bias=True, partial_rotary_factor=0.4, hidden_size=60),
    "stablelm-parallel": _sizes(use_parallel_residual=True, partial_rotary_factor=1.0),
    "gpt_neox": _without(_sizes(rotary_pct=0.4, hidden_size=60), "num_key_value_heads"),
    "gpt_neox-sequential": _without(
        _sizes(use_parallel_residual=False, rotary_pct=1.0, hidden_act="relu"), "num_key_value_heads"
    ),
    "gptj": _GPT2 | {"rotary_dim": 4, "tie_word_embeddings": False},
    "nemotron": _sizes(attention_bias=True, mlp_bias=True, partial_rotary_factor=0.5, head_dim=12),
    "arcee": _sizes(attention_bias=True, mlp_bias=True, rope_parameters=_YARN),
    "apertus": _sizes(num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True),
    "hunyuan_v1_dense": _sizes(
        head_dim=10,
        rope_scaling=_rope(alpha=50.0, factor=1.0) | {"rope_type": "dynamic"},
        attention_bias=True,
    ),
    "opt": _without(_sizes(ffn_dim=44, tie_word_embeddings=True), "intermediate_size", "num_key_value_heads"),
    "bloom": {
        "vocab_size": VOCAB,
        "hidden_size": 36,
        "n_layer": 2,
        "n_head": 6,
        "tie_word_embeddings": True,
    },
    "falcon": _without(
        _sizes(multi_query=True, tie_word_embeddings=True), "num_key_value_heads", "intermediate_size"
    ),
    "falcon-new": _without(
        _sizes(new_decoder_architecture=True, num_kv_heads=3, bias=True),
        "num_key_value_heads",
        "intermediate_size",
    ),
    "falcon-alibi": _without(
        _sizes(alibi=True, multi_query=False, parallel_attn=False, bias=True),
        "num_key_value_heads",
        "intermediate_size",
    ),
}
_LATENT: Config = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
_GROUPED: Config = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 12,
    "n_routed_experts": 9,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
_TYPES |= {
    "ernie4_5_moe": _sizes(
        num_hidden_layers=3,
        moe_intermediate_size=12,
        moe_num_experts=7,
        moe_k=3,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        tie_word_embeddings=True,
    ),
    "hunyuan_v1_moe": _sizes(
        head_dim=10,
        num_experts=5,
        moe_topk=[2, 3],
        rope_scaling=_rope(alpha=50.0, factor=1.0) | {"rope_type": "dynamic"},
        tie_word_embeddings=True,
    ),
    "internlm3": _sizes(head_dim=10, qkv_bias=True, bias=True),
    "minimax_m2": _sizes(
        head_dim=10,
        num_local_experts=7,
        num_experts_per_tok=3,
        rope_parameters=_rope(500.0, partial_rotary_factor=0.6),
    ),
    "phimoe": _sizes(
        num_local_experts=5,
        sliding_window=11,
        attention_bias=True,
        lm_head_bias=True,
        router_jitter_noise=0.2,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.5, 2.5],
            "long_factor": [2.0, 3.0, 4.0],
            "short_mscale": 1.2,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 64,
        },
    ),
    "deepseek_v2": _sizes(
        **_LATENT | {"q_lora_rank": None},
        **_GROUPED,
        topk_method="group_limited_greedy",
        rope_scaling=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
    ),
    "deepseek_v3": _sizes(
        **_LATENT,
        **_GROUPED,
        attention_bias=True,
        rope_scaling=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4_moe_lite": _sizes(**_LATENT, **_without(_GROUPED, "first_k_dense_replace")),
    "minicpm3": _sizes(**_LATENT, scale_emb=3, scale_depth=0.9, dim_model_base=9, tie_word_embeddings=True),
    "gpt2": {**_GPT2, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": True},
    "gpt_oss": _sizes(
        num_hidden_layers=3,
        head_dim=10,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=9,
        swiglu_limit=1.5,
        rope_parameters=_rope(150.0, factor=8.0, original_max_position_embeddings=16, truncate=False)
        | {"rope_type": "yarn"},
    ),
}
CONFIGS: Mapping[str, Config] = {
    name: {"model_type": name.partition("-")[0], "torch_dtype": "float32", **config}
    for name, config in _TYPES.items()
}
"""Name of a golden, the file with the expected logits of a tiny checkpoint -> the config.json of that
checkpoint, as a JSON object."""
_DIFFERENCES_FROM_1 = ("gemma", "nemotron")
"""Model types whose norms add 1 to their stored weights."""


def weights(name: str, shapes: Mapping[str, list[int]]) -> dict[str, Values]:
    """Returns random weights, scaled so that activations stay near 1 through the layers and attention is far
    from uniform."""
    rng = np.random.default_rng(crc32(name.encode()))
    config = CONFIGS[name]
    values = {}
    for tensor in sorted(shapes):
        shape = shapes[tensor]
        value = rng.standard_normal(shape)
        if tensor.endswith((".beta", ".eps")):
            value = np.full(shape, 0.5 if tensor.endswith("beta") else -1e-6)
        elif tensor.endswith(("alpha_p", "alpha_n", "bias", "sinks")):
            value = value * 0.3
        elif len(shape) == 1 or "q_norm" in tensor or "k_norm" in tensor:
            value = value * 0.2 + (0.0 if name.startswith(_DIFFERENCES_FROM_1) else 1.0)
        elif "embed" in tensor or "wte" in tensor:
            value = value * (0.2 if config.get("tie_word_embeddings") else 0.7)
        else:
            value = value * 1.4 / np.sqrt(shape[1])
        values[tensor] = value.astype(np.float32)
    return values


def tokens(name: str) -> Values:
    return np.random.default_rng(crc32(name.encode()) + 1).integers(3, VOCAB, TOKENS)


@dataclass(frozen=True)
class TypeGolden:
    """A tiny checkpoint of one model type: its config, its weights, input tokens, and the logits that
    transformers computes for them."""

    config: ModelConfig
    weights: Mapping[str, Values]
    """Parameter name in this project -> its values, as read from the checkpoint."""
    tokens: list[int]
    logits: Values


def stored(name: str) -> tuple[dict[str, Values], Values]:
    """Reads a golden file, the expected logits of a tiny checkpoint. Returns (tensor name -> values of the
    checkpoint, which are generated from the name and not read; logits, float32 [n, vocabulary])."""
    data = (HERE / f"{name}.safetensors").read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:base])
    start, stop = (base + offset for offset in header["logits"]["data_offsets"])
    logits = np.frombuffer(data[start:stop], "<f4").reshape(header["logits"]["shape"])
    return weights(name, json.loads(header["__metadata__"]["shapes"])), logits


def load(name: str, area: Path) -> TypeGolden:
    """Reads a golden file (the expected logits of a tiny checkpoint) and writes the checkpoint, whose weights
    are generated from the name, to the directory `area`. Returns config, weights, input tokens and logits."""
    tensors, logits = stored(name)
    save(area / "model.safetensors", {tensor: entry(value, "F32") for tensor, value in tensors.items()})
    config = parsing.parse(CONFIGS[name], name)
    read = exact_weights.checkpoint(area, config, parsing.tensor_names(config))
    values = {parameter: np.asarray(value) for parameter, value in read.items()}
    return TypeGolden(config, values, [int(token) for token in tokens(name)], logits)


NAMES = sorted(CONFIGS)
