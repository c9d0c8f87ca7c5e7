"""Translates the metadata of GGUF files of models with experts into fields of config.json.

Properties that a file does not state, such as whether weights of experts are divided by their sum, are fixed
for an architecture; the functions here set them as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mlcbuild.checkpoints.gguf_keys import Fields, GgufKeys
from mlcbuild.models.fields import ABSENT

SOFTMAX, SIGMOID = 1, 2
"""The two supported values of the metadata key expert_gating_func of GGUF files: numbers that stand for
softmax and sigmoid, by which a model computes scores of experts from its router's logits.
"""
_DOWN = "ffn_down_exps.weight"


def _counts(keys: GgufKeys) -> Fields:
    """Returns the config.json fields with the number of experts and the number that a token uses, from a GGUF
    file's metadata. keys: the metadata's reader, in which a problem is recorded if the tensors of the first
    layer with experts hold another number of experts.
    """
    count = keys.integer("expert_count")
    stacks = (tensor for name, tensor in keys.gguf.tensors.items() if name.endswith(_DOWN))
    stack = next(stacks, None)
    if stack is not None and stack.shape[0] != count:
        keys.refuse("expert_count", f"is {count}, but tensor '{stack.name}' holds {stack.shape[0]} experts")
    return {"num_experts": count, "num_experts_per_tok": keys.integer("expert_used_count")}


def _size(keys: GgufKeys) -> int:
    """Returns the number of hidden units of an expert of the model in a GGUF file: expert_feed_forward_length
    or, without this metadata key, feed_forward_length, that of the dense feed-forwards. If the file lacks
    feed_forward_length, a problem is recorded in `keys` in either case.
    """
    return keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))


def _layers(keys: GgufKeys, *, sparse: bool) -> list[int]:
    """Returns the indices of those layers of the model in a GGUF file that have a router of experts, if
    `sparse` is True, or else of those that have none. A file may state any number of layers, so at most as
    many as it has tensors are looked at.
    """
    layers = range(min(keys.integer("block_count"), len(keys.gguf.tensors)))
    return [index for index in layers if keys.has_tensor(f"blk.{index}.ffn_gate_inp.weight") == sparse]


def _leading_dense(keys: GgufKeys) -> int:
    """Returns the number of layers before the first one with a router of experts, or of all layers if none
    has one. It is read from the names of a GGUF file's tensors, because some files lack the metadata key.
    """
    keys.count("leading_dense_block_count")
    dense = _layers(keys, sparse=False)
    return next((number for number, index in enumerate(dense) if number != index), len(dense))


def mixtral(keys: GgufKeys) -> Fields:
    """Returns the config.json fields that Mixtral, whose GGUF files have the architecture llama, has in
    addition to those of all model families, read from the metadata of a GGUF file.
    """
    return {
        **_counts(keys),
        "model_type": "mixtral",
        "intermediate_size": _size(keys),
        "sliding_window": keys.count("attention.sliding_window") or None,
    }


def _qwen2_moe(keys: GgufKeys) -> Fields:
    dense = keys.integer("feed_forward_length")
    return {
        **_counts(keys),
        "model_type": "qwen2_moe",
        "moe_intermediate_size": keys.integer(
            "expert_feed_forward_length", max(dense // keys.integer("expert_used_count"), 1)
        ),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", dense),
        "norm_topk_prob": False,
        "mlp_only_layers": _layers(keys, sparse=False),
        "qkv_bias": keys.has_bias("attn_q"),
    }


def _qwen3_moe(keys: GgufKeys) -> Fields:
    return {
        **_counts(keys),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": _size(keys),
        "norm_topk_prob": True,
        "mlp_only_layers": _layers(keys, sparse=False),
        "attention_bias": keys.has_bias("attn_q"),
    }


def _olmoe(keys: GgufKeys) -> Fields:
    return {
        **_counts(keys),
        "intermediate_size": _size(keys),
        "norm_topk_prob": False,
        "attention_bias": keys.has_bias("attn_q"),
    }


def granite_scalars(keys: GgufKeys) -> Fields:
    """Returns the config.json fields with Granite's multipliers, and whether its attention has biases, from
    the metadata of a GGUF file. Its logit_scale divides logits, as the original's logits_scaling does.
    """
    return {
        "attention_bias": keys.has_bias("attn_q"),
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _granite_moe(keys: GgufKeys) -> Fields:
    fields = {**_counts(keys), **granite_scalars(keys), "intermediate_size": _size(keys)}
    shared = keys.count("expert_shared_feed_forward_length")
    if shared:
        return {**fields, "model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return fields


def _grouped(keys: GgufKeys) -> Fields:
    """Returns, from a GGUF file, the config.json fields of models whose first layers are dense and whose
    other layers have shared experts in addition to those that a router chooses, in groups if the file states
    any.
    """
    return {
        **_counts(keys),
        "num_hidden_layers": max(keys.integer("block_count") - keys.count("nextn_predict_layers"), 1),
        "moe_intermediate_size": _size(keys),
        "n_shared_experts": keys.integer("expert_shared_count", 1),
        "first_k_dense_replace": _leading_dense(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }


def _sigmoid_scores(keys: GgufKeys) -> None:
    """Records a problem if a GGUF file states another function than sigmoid for computing experts' scores
    from a router's logits. keys: the reader of the file's metadata, which collects problems.
    """
    gating = keys.count("expert_gating_func") or SIGMOID
    if gating != SIGMOID:
        keys.refuse("expert_gating_func", f"must be {SIGMOID} (sigmoid) for this architecture, not {gating}")


def _dots1(keys: GgufKeys) -> Fields:
    _sigmoid_scores(keys)
    return {**_grouped(keys), "sliding_window": None, "attention_bias": keys.has_bias("attn_q")}


def _glm4_moe(keys: GgufKeys) -> Fields:
    _sigmoid_scores(keys)
    return {
        **_grouped(keys),
        "model_type": "glm4_moe",
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "attention_bias": keys.has_bias("attn_q"),
    }


def _deepseek2(keys: GgufKeys) -> Fields:
    """Returns the config.json fields of DeepSeek-V2 or, if the router's scores are sigmoids, of DeepSeek-V3,
    from a GGUF file. Where its metadata do not state the function of the scores, it is sigmoid if the file
    has tensors that correct scores, otherwise softmax. A third function is recorded as a problem in `keys`,
    the reader of the metadata.
    """
    is_corrected = any(".exp_probs_b." in name for name in keys.gguf.tensors)
    gating = keys.count("expert_gating_func") or (SIGMOID if is_corrected else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        keys.refuse("expert_gating_func", f"must be {SOFTMAX} (softmax) or {SIGMOID} (sigmoid), not {gating}")
    is_v3 = gating == SIGMOID
    fields = {**_grouped(keys), **_latent(keys), "model_type": "deepseek_v3" if is_v3 else "deepseek_v2"}
    if not is_v3:
        fields["topk_method"] = "group_limited_greedy" if keys.count("expert_group_count") > 1 else "greedy"
    return fields


def _latent(keys: GgufKeys) -> Fields:
    """Returns the config.json fields of latent attention (ranks, head sizes) from a GGUF file. The head sizes
    are those of the metadata keys attention.key_length_mla and attention.value_length_mla, which files have
    that store attention as one head of keys; without them, those of attention.key_length and
    attention.value_length.
    """
    rotated = keys.integer("rope.dimension_count")
    lengths = {}
    for name in ("key_length", "value_length"):
        by_head = f"attention.{name}_mla"
        lengths[name] = keys.integer(f"attention.{name}" if keys.get(by_head) is None else by_head)
    return {
        "head_dim": ABSENT,
        "partial_rotary_factor": ABSENT,
        "num_key_value_heads": keys.integer("attention.head_count"),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": None
        if keys.has_tensor("blk.0.attn_q.weight")
        else keys.integer("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": max(lengths["key_length"] - rotated, 1),
        "v_head_dim": lengths["value_length"],
        "attention_bias": keys.has_bias("attn_kv_a_mqa"),
    }


def _gpt_oss(keys: GgufKeys) -> Fields:
    counts = _counts(keys)
    return {
        "num_local_experts": counts["num_experts"],
        "num_experts_per_tok": counts["num_experts_per_tok"],
        "model_type": "gpt_oss",
        "intermediate_size": _size(keys),
        "sliding_window": keys.integer("attention.sliding_window"),
        "attention_bias": keys.has_bias("attn_q"),
    }


def _ernie4_5_moe(keys: GgufKeys) -> Fields:
    """Returns the config.json fields of ERNIE 4.5 with experts, from a GGUF file. The number of shared
    experts is computed from the size of their tensors, because converters write a wrong size. If the file
    states another number of them, a problem is recorded in `keys`, the reader of the file's metadata.
    """
    size = _size(keys)
    keys.get("expert_shared_feed_forward_length")
    shared = keys.gguf.tensors.get(f"blk.{_leading_dense(keys)}.ffn_up_shexp.weight")
    count = 0 if shared is None else shared.shape[0] // size
    if keys.get("expert_shared_count") is not None and keys.count("expert_shared_count") != count:
        keys.refuse("expert_shared_count", f"must be {count}, as the tensors have it")
    return {
        **_counts(keys),
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": size,
        "moe_num_shared_experts": count,
        "moe_layer_start_index": _leading_dense(keys),
        "moe_layer_end_index": max(_layers(keys, sparse=True), default=-1),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(keys: GgufKeys) -> Fields:
    size = keys.integer("feed_forward_length")
    shared = keys.integer("expert_shared_feed_forward_length", size)
    if shared != size:
        keys.refuse("expert_shared_feed_forward_length", f"must be {size}, like feed_forward_length")
    return {
        **_counts(keys),
        "model_type": "hunyuan_v1_moe",
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", size),
        "num_shared_expert": keys.integer("expert_shared_count", 1),
        "attention_bias": keys.has_bias("attn_q"),
    }


def _minimax_m2(keys: GgufKeys) -> Fields:
    _sigmoid_scores(keys)
    return {**_counts(keys), "model_type": "minimax_m2", "intermediate_size": _size(keys)}


def phi_lengths(keys: GgufKeys) -> Fields:
    """Returns, from a GGUF file, two config.json fields that Phi-3 models have in addition to those of all
    families: the size of the attention window in tokens (None without windows) and, if the metadata state it,
    the context length before rope scaling extended it.
    """
    fields: Fields = {"sliding_window": keys.count("attention.sliding_window") or None}
    if keys.get("rope.scaling.original_context_length") is not None:
        original = keys.integer("rope.scaling.original_context_length")
        fields["original_max_position_embeddings"] = original
    return fields


def _phimoe(keys: GgufKeys) -> Fields:
    return {
        **_counts(keys),
        **phi_lengths(keys),
        "intermediate_size": _size(keys),
        "attention_bias": keys.has_bias("attn_q"),
        "lm_head_bias": keys.has_tensor("output.bias"),
    }


EXPERTS: Mapping[str, Callable[[GgufKeys], Fields]] = {
    "deepseek2": _deepseek2,
    "dots1": _dots1,
    "ernie4_5-moe": _ernie4_5_moe,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granite_moe,
    "hunyuan-moe": _hunyuan_moe,
    "minimax-m2": _minimax_m2,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
}
"""GGUF architecture with experts -> function from the reader of a file's metadata to the config.json fields
that only this architecture's model family has, and the model_type where it differs from the architecture.
"""
