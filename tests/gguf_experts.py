"""Writes GGUF files of models with experts, in the form that llama.cpp's converter writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests import experts_golden, make_experts, typegoldens
from tests.gguf_files import LAYER, WHOLE, Floats, add_key, add_tensor, entries, paired

CHANGES: Mapping[str, dict[str, Any]] = {
    "deepseek_v2": {
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        }
    },
    "deepseek_v3": {},
    "dots1": {"sliding_window": None},
    "ernie4_5_moe": {"rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    "glm4_moe": {},
    "gpt_oss": {"swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {
        "moe_topk": [2, 2],
        "rope_scaling": None,
        "rope_theta": 25000.0,
        "rms_norm_eps": 1e-5,
    },
    "minimax_m2": {},
    "mixtral": {"sliding_window": None},
    "olmoe": {},
    "phimoe": {
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.5, 2.5],
            "long_factor": [2.0, 3.0, 4.0],
            "short_mscale": 1.25,
            "long_mscale": 1.25,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3_moe-8-of-257": {},
}
"""Name of a test model -> fields of its config.json that replace the original values before it is written as
a GGUF file, because such files do not contain these fields or contain rounded values."""
TOKENS = 20
ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_INTEGERS = {
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_k": "expert_used_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_num_experts": "expert_count",
    "moe_num_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_local_experts": "expert_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "topk_group": "expert_group_used_count",
}
"""Field of config.json -> key of GGUF metadata with an integer value."""
_NAMES = {
    **LAYER,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    **{
        f"mlp.shared_{name}.{kind}_proj": f"ffn_{kind}_shexp"
        for name in ("expert", "experts", "mlp")
        for kind in ("gate", "up", "down")
    },
}
"""Name of a module within a transformers layer -> name of the tensor within a block of a GGUF file."""
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
_KINDS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


def checkpoint(name: str) -> tuple[dict[str, Any], dict[str, Floats]]:
    """Returns a test checkpoint in the form that its GGUF file can express: (config.json with some fields
    replaced; tensor name -> values)."""
    if name in typegoldens.CONFIGS:
        config, tensors = dict(typegoldens.CONFIGS[name]), typegoldens.stored(name)[0]
    else:
        golden = experts_golden.golden(name)
        config, tensors = dict(golden.values), golden.tensors
    return {**config, **CHANGES[name]}, tensors


def tokens(name: str) -> NDArray[np.int64]:
    both = typegoldens.tokens if name in typegoldens.CONFIGS else make_experts.tokens
    return np.asarray(both(name)[:TOKENS])


def write(name: str, path: Path, form: str = "") -> None:
    """Writes a test model as a GGUF file of float32 tensors. name: model type; form: "fused" stores the gate
    and up matrices as one tensor; "apart" stores one tensor for each expert, as old files do; "mha" stores
    latent attention with one key head for each query head, as old files do; "" as llama.cpp's converter
    does."""
    write_model(*checkpoint(name), path, form=form)


def write_model(
    config: Mapping[str, Any],
    tensors: Mapping[str, Floats],
    path: Path,
    kind: str = "F32",
    *,
    form: str = "",
    changes: Mapping[str, Any] | None = None,
    more: Mapping[str, Floats] | None = None,
) -> None:
    """Writes a model to a GGUF file. config: fields of config.json; tensors: name -> values; kind: GGUF type
    of matrices whose rows are a multiple of the type's block, while other tensors are float32; changes:
    metadata key without the architecture -> value that replaces the one from the config, or None to omit the
    key; more: additional float32 tensors."""
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in {**_keys(config, architecture, form), **(changes or {})}.items():
        if value is not None:
            add_key(writer, f"{architecture}.{key}", value)
    for tensor_name, values in _form(
        dict(_stacked(dict(_tensors(config, tensors, architecture)))), config, form
    ):
        add_tensor(writer, tensor_name, values, kind)
    scaling = config.get("rope_scaling") or {}
    factors = {f"rope_factors_{part}.weight": scaling.get(f"{part}_factor") for part in ("short", "long")}
    long_rope = {name: np.asarray(values, np.float32) for name, values in factors.items() if values}
    for tensor_name, values in {**long_rope, **(more or {})}.items():
        add_tensor(writer, tensor_name, values, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(config: Mapping[str, Any], architecture: str, form: str) -> dict[str, Any]:
    keys = {key.partition(".")[2]: value for key, value in entries(config, architecture)}
    keys |= {key: config[field] for field, key in _INTEGERS.items() if field in config}
    if architecture in ("gpt-oss", "minimax-m2"):
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture == "minimax-m2":
        keys["expert_gating_func"] = 2
        keys["rope.dimension_count"] = int(
            config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]
        )
    if architecture == "phimoe":
        keys["rope.scaling.attn_factor"] = config["rope_scaling"]["short_mscale"]
    if architecture == "ernie4_5-moe":  # an odd quotient, which the converter writes
        keys["interleave_moe_layer_step"] = 1
        keys["expert_shared_feed_forward_length"] = (
            config["intermediate_size"] // config["num_key_value_heads"]
        )
    if architecture == "hunyuan-moe":
        keys["expert_used_count"] = config["moe_topk"][0]
        keys |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    if "routed_scaling_factor" in config:
        keys["expert_weights_scale"] = config["routed_scaling_factor"]
        keys["expert_gating_func"] = 1 if config["model_type"] == "deepseek_v2" else 2
        keys["expert_weights_norm"] = config["model_type"] != "deepseek_v2"
    if architecture == "deepseek2":
        keys |= _latent_keys(config, form)
    return keys


def _latent_keys(config: Mapping[str, Any], form: str) -> dict[str, Any]:
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    lengths = {"key_length": config["qk_nope_head_dim"] + rotated, "value_length": config["v_head_dim"]}
    keys = {f"attention.{key}{'' if form == 'mha' else '_mla'}": value for key, value in lengths.items()}
    if form != "mha":
        keys |= {"attention.key_length": latent + rotated, "attention.value_length": latent}
        keys["attention.head_count_kv"] = 1
    if config["q_lora_rank"]:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    keys |= {"attention.kv_lora_rank": latent, "rope.dimension_count": rotated}
    return {**keys, "rope.scaling.yarn_log_multiplier": 0.1 * config["rope_scaling"]["mscale_all_dim"]}


def _tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Floats], architecture: str
) -> Iterator[tuple[str, Floats]]:
    """Yields (name in a GGUF file, values) of each tensor of a checkpoint; names of the tensors of one expert
    end in `.<expert>`."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    for name, values in tensors.items():
        if name in WHOLE:
            yield WHOLE[name], values
            continue
        _, _, layer, rest = name.split(".", 3)
        for tensor_name, part in _in_layer(rest, values):
            is_paired = architecture in ("llama", "granitemoe") and tensor_name.startswith(
                ("attn_q.", "attn_k.")
            )
            turned = (
                paired(part, heads if tensor_name.startswith("attn_q.") else groups) if is_paired else part
            )
            is_post = architecture in ("glm4moe", "gpt-oss") and tensor_name == "ffn_norm.weight"
            yield f"blk.{layer}.{'post_attention_norm.weight' if is_post else tensor_name}", turned


def _in_layer(name: str, values: Floats) -> Iterator[tuple[str, Floats]]:
    """Yields (name within a block of a GGUF file, values) of the tensors that a tensor of a transformers
    layer becomes."""
    if match := _EXPERT.fullmatch(name):
        yield f"ffn_{_KINDS[match[3]]}.{match[2]}.weight", values
    elif name.endswith(".e_score_correction_bias"):
        yield "exp_probs_b.bias", values
    elif name == "self_attn.sinks":
        yield "attn_sinks.weight", values
    elif name == "mlp.shared_expert_gate.weight":
        yield "ffn_gate_inp_shexp.weight", values[0]
    elif "input_linear" in name:
        kind = "shexp" if name.startswith("shared") else "exps"
        gate, up = np.split(values, 2, axis=-2)
        yield f"ffn_gate_{kind}.weight", gate
        yield f"ffn_up_{kind}.weight", up
    elif "experts.gate_up_proj" in name:
        ending = "bias" if name.endswith("_bias") else "weight"
        turned = values if ending == "bias" else values.swapaxes(1, 2)
        yield f"ffn_gate_exps.{ending}", turned[:, ::2]
        yield f"ffn_up_exps.{ending}", turned[:, 1::2]
    elif name.startswith("mlp.experts.down_proj"):
        is_bias = name.endswith("_bias")
        yield f"ffn_down_exps.{'bias' if is_bias else 'weight'}", values if is_bias else values.swapaxes(1, 2)
    else:
        module, _, ending = name.rpartition(".")
        yield f"{_NAMES[module]}.{ending}", values


def _stacked(tensors: Mapping[str, Floats]) -> Iterator[tuple[str, Floats]]:
    """Yields (GGUF name, values) of all tensors. The matrices of a layer's single experts, which are named by
    numbers, are stacked to one tensor [experts, rows, columns] as GGUF files store them."""
    stacks: dict[str, dict[int, Floats]] = {}
    for name, values in tensors.items():
        head, _, expert = name.removesuffix(".weight").rpartition(".")
        if expert.isdigit():
            stacks.setdefault(f"{head}_exps.weight", {})[int(expert)] = values
        else:
            yield name, values
    for name, experts in stacks.items():
        yield name, np.stack([experts[number] for number in range(len(experts))])


def _form(tensors: dict[str, Floats], config: Mapping[str, Any], form: str) -> Iterator[tuple[str, Floats]]:
    for name, values in tensors.items():
        if form == "fused" and name.endswith("ffn_gate_exps.weight"):
            up = tensors[name.replace("gate", "up")]
            yield name.replace("gate", "gate_up"), np.concatenate([values, up], axis=1)
        elif form == "apart" and name.endswith("_exps.weight"):
            for number, expert in enumerate(values):
                yield name.replace("_exps", f".{number}"), expert
        elif form != "mha" and name.endswith("attn_kv_b.weight"):
            both = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            keys, others = np.split(both, [config["qk_nope_head_dim"]], axis=1)
            yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), others
        elif not (form == "fused" and name.endswith("ffn_up_exps.weight")):
            yield name, values
