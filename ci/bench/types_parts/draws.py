"""Draws random config.json files of a model type, with sizes and options that few checkpoints have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

Config = dict[str, Any]
POSITIONS = 64
VOCAB = 71
KINDS = ("full_attention", "sliding_attention")
SIZES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "inner": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "positions": ("max_position_embeddings", "n_positions"),
}
"""Name of a size of a model, such as "hidden" -> the names of the config.json fields that hold it; model
types differ in which they use."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")
SHARES = {"glm": 0.5, "glm4": 0.5, "nemotron": 0.5, "phi": 0.5, "stablelm": 0.25, "gpt_neox": 0.25}
"""Model type that rotates only a part of each head's dimensions in its rotary embedding -> that part, as a
fraction, in its usual configs.
"""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "swish", "gelu_fast")


@dataclass
class Draw:
    """A random config.json that is being created, field by field. All random choices come from the generator
    `rng`.
    """

    rng: Random
    name: str
    defaults: Mapping[str, Any]
    config: Config = field(default_factory=dict)
    layers: int = 0
    head_dim: int = 0

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def size(self, kind: str, value: int) -> None:
        """Sets a size, such as that of the hidden state, in the config, under the field name that the model
        type uses for it; does nothing if the type has no such field. kind: a key of SIZES."""
        for name in SIZES[kind]:
            if name in self.defaults:
                self.config[name] = value

    def option(self, name: str, value: Callable[[], Any], share: float = 0.7) -> None:
        """Sets a field of the random config with the probability `share`, but only if the model type has the
        field. value: function without arguments that returns the field's random value."""
        if name in self.defaults and self.chance(share):
            self.config[name] = value()


def random_config(rng: Random, name: str, defaults: Mapping[str, Any]) -> Config:
    """Returns a random config.json of a model type, with sizes and options drawn from `rng`. name: the model
    type; defaults: name of each field of the type -> its value in transformers, of which `text_config`, for a
    multimodal type, holds the fields of its text model."""
    if "text_config" in defaults:
        return _wrapped(rng, name, defaults)
    own = Draw(rng, name, defaults)
    own.config |= {"model_type": name, "vocab_size": VOCAB + rng.randrange(9), "pad_token_id": 0}
    if "torch_dtype" not in own.config:
        own.config["torch_dtype"] = "float32"
    _sizes(own)
    _switches(own)
    _rope(own)
    _windows(own)
    _experts(own)
    return own.config


def _wrapped(rng: Random, name: str, defaults: Mapping[str, Any]) -> Config:
    text = defaults["text_config"]
    inner = random_config(rng, text["model_type"], text)
    tied = inner.pop("tie_word_embeddings", False)
    size = inner["hidden_size"]
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "gemma3":
        vision |= {"image_size": 8, "patch_size": 4, "model_type": "siglip_vision_model"}
    elif name == "mistral3":
        vision |= {"head_dim": 4, "image_size": 8, "patch_size": 4, "model_type": "pixtral"}
    else:
        vision = {"hidden_size": 8, "intermediate_size": 8, "depth": 1, "num_heads": 2, "patch_size": 4}
        vision |= {"out_hidden_size": size, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
    config = {"model_type": name, "text_config": inner, "vision_config": vision}
    if name == "gemma3":
        config["mm_tokens_per_image"] = 4
    if rng.random() < 0.8:
        config["tie_word_embeddings"] = tied
    return config


def _sizes(own: Draw) -> None:
    rng = own.rng
    own.layers = rng.choice((1, 2, 3, 4))
    kv_heads = rng.choice((1, 2, 3, 5))
    heads = kv_heads * rng.choice((1, 1, 2, 3, 4))
    own.head_dim = rng.choice((8, 16, 24, 40) if own.name in SHARES else (4, 6, 8, 10, 12, 16, 18, 32))
    has_dim = "head_dim" in own.defaults and own.name not in LATENT and own.name != "persimmon"
    hidden = heads * own.head_dim
    if has_dim and own.chance(0.7):
        hidden = heads * rng.choice((2, 3, 4, 5, 8)) * 2
        own.config["head_dim"] = own.head_dim
    elif has_dim:
        own.config["head_dim"] = own.head_dim
    if own.name in LATENT:
        kv_heads, hidden = heads, heads * rng.choice((4, 6, 10))
        own.config |= {"kv_lora_rank": rng.choice((4, 17, 20, 32)), "v_head_dim": rng.choice((3, 7, 8, 16))}
        own.config["qk_nope_head_dim"] = rng.choice((3, 8, 10, 16))
        if own.name == "deepseek_v2":  # transformers requires strides of two for its complex numbers
            own.config |= {
                "kv_lora_rank": rng.choice((4, 18, 32)),
                "qk_nope_head_dim": rng.choice((4, 8, 10)),
            }
        own.config["q_lora_rank"] = rng.choice((None, 5, 14, 24))
        own.config["qk_rope_head_dim"] = own.head_dim = rng.choice((2, 4, 6, 8, 12))
    own.size("hidden", hidden)
    own.size("layers", own.layers)
    own.size("heads", heads)
    own.size("kv_heads", kv_heads)
    own.size("inner", rng.choice((8, 12, 29, 40, 44)))
    own.size("positions", POSITIONS)
    if "n_inner" in own.config and own.chance(0.5):
        own.config["n_inner"] = None
    if "word_embed_proj_dim" in own.defaults:
        own.config["word_embed_proj_dim"] = hidden


def _switches(own: Draw) -> None:
    rng = own.rng
    for name, value in own.defaults.items():
        if isinstance(value, bool) and name not in NOT_DRAWN:
            own.option(name, lambda: rng.random() < 0.5)
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        own.option(name, lambda: rng.choice(ACTIVATIONS), 0.4)
    own.option("rms_norm_eps", lambda: rng.choice((1e-6, 1e-5, 1e-2)), 0.95)
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"):
        own.option(name, lambda: rng.choice((1e-6, 1e-5, 1e-2)))
    for name in NUMBERS:
        own.option(name, lambda: rng.choice((0.3, 0.7, 1.0, 1.7, 3.0)))
    own.option("scale_emb", lambda: rng.choice((1, 2, 12)))
    own.option("dim_model_base", lambda: rng.choice((1, 9, 64)))
    own.option("query_pre_attn_scalar", lambda: rng.choice((3, 7, 24, 144)))
    own.option("attn_logit_softcapping", lambda: rng.choice((None, 0.5, 3.0, 50.0)))
    own.option("final_logit_softcapping", lambda: rng.choice((None, 0.5, 3.0, 30.0)))
    own.option("clip_qkv", lambda: rng.choice((None, 0.4, 1.3)))
    if own.config.get("new_decoder_architecture") is not None and own.chance(0.5):
        own.config["num_ln_in_parallel_attn"] = rng.choice((None, 1, 2))


def _theta(own: Draw) -> float:
    return own.rng.choice((50.0, 1000.0, 10000.0, 500000.0, 1e6))


def _rope(own: Draw) -> None:
    if "rope_parameters" not in own.defaults:
        own.option("rotary_dim", lambda: own.rng.choice((2, 4, own.head_dim)), 1.0)
        return
    rng, share = own.rng, SHARES.get(own.name)
    rope: Config = {"rope_type": "default", "rope_theta": _theta(own)}
    if share is not None and own.chance(0.7):
        rope["partial_rotary_factor"] = rng.choice((0.25, 0.5, 1.0))
    elif own.name in ("glm4_moe", "minimax_m2"):
        rope["partial_rotary_factor"] = rng.choice((0.5, 1.0))
    rotated = int(own.head_dim * rope.get("partial_rotary_factor", share or 1.0))
    kind = rng.choice(("default", "default", "linear", "llama3", "yarn", "longrope"))
    if own.name in ("phi3", "phimoe") and kind != "default":
        kind = "longrope"
    rope |= _scaling(own, kind, rotated) | {"rope_type": kind}
    if own.name in ("hunyuan_v1_dense", "hunyuan_v1_moe") and own.chance(0.5):
        rope = {"rope_theta": rope["rope_theta"], "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    if own.name == "ministral3" and own.chance(0.7):
        rope |= {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16}
    if own.name == "qwen3_vl_text":
        rope |= {"mrope_section": [rotated // 2, 0, 0], "mrope_interleaved": True}
    _store_rope(own, rope)


def _scaling(own: Draw, kind: str, rotated: int) -> Config:
    rng = own.rng
    factor = {"factor": rng.choice((1.5, 4.0, 8.0))}
    if kind == "linear":
        return factor
    original = {"original_max_position_embeddings": rng.choice((16, 32))}
    if kind == "llama3":
        return {**factor, **original, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        more: Config = {}
        if own.chance(0.4):
            more |= {"beta_fast": 20.0, "beta_slow": 2.0}
        if own.chance(0.4):
            more |= {"mscale": 0.7, "mscale_all_dim": rng.choice((0.5, 1.0))}
        elif own.chance(0.3):
            more["attention_factor"] = 1.3
        if own.chance(0.3):
            more["truncate"] = False
        return {**factor, **original, **more}
    if kind == "longrope":
        count = rotated // 2
        short = [1.0 + rng.random() for _ in range(count)]
        scales = {"short_factor": short, "long_factor": [2.0 + 3 * rng.random() for _ in range(count)]}
        mscales = {"short_mscale": 1.2, "long_mscale": 1.3} if own.name == "phimoe" else {}
        return {**scales, **mscales, "original_max_position_embeddings": rng.choice((16, POSITIONS))}
    return {}


def _store_rope(own: Draw, rope: Config) -> None:
    """Stores the parameters of the rotary embedding in a random config.json: with equal chance under
    "rope_parameters", as transformers 5 writes them, or as separate fields, as transformers 4 does. Types
    with two kinds of layers always get "rope_parameters", with one entry for each kind."""
    if any(kind in (own.defaults["rope_parameters"] or {}) for kind in KINDS):
        local = {"rope_type": "default", "rope_theta": _theta(own)}
        own.config["rope_parameters"] = {KINDS[0]: rope, KINDS[1]: local}
        return
    if own.chance(0.5):
        own.config["rope_parameters"] = rope
        return
    own.config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        own.config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope["rope_type"] == "longrope":
        own.config["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
    if rope["rope_type"] != "default" or len(rope) > 1:
        own.config["rope_scaling"] = rope


def _windows(own: Draw) -> None:
    rng = own.rng
    own.option("sliding_window", lambda: rng.choice((None, 1, 5, 9, 13, 300)), 0.9)
    own.option("max_window_layers", lambda: rng.randrange(own.layers + 1), 1.0)
    own.option("sliding_window_pattern", lambda: rng.choice((2, 3, 4)))
    own.option("layer_types", lambda: [rng.choice(KINDS) for _ in range(own.layers)], 0.5)
    own.option("no_rope_layers", lambda: [rng.randrange(2) for _ in range(own.layers)])
    own.option("no_rope_layer_interval", lambda: rng.choice((1, 2, 3)))


def _experts(own: Draw) -> None:
    rng = own.rng
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    present = [name for name in names if name in own.defaults]
    if not present:
        return
    groups = rng.choice((1, 1, 3)) if "n_group" in own.defaults else 1
    count = groups * rng.choice((2, 4)) if groups > 1 else rng.choice((1, 2, 3, 5, 8, 60, 257))
    kept = rng.choice((1, groups)) if groups > 1 else 1
    chosen = rng.choice([n for n in (1, 1, 2, 3, 8) if n <= count // groups * kept])
    if own.name == "phimoe":
        count, chosen = max(count, 2), 2
    own.config |= dict.fromkeys(present, count)
    for name in ("num_experts_per_tok", "moe_k", "moe_topk"):
        own.option(name, lambda: chosen, 1.0)
    if "n_group" in own.defaults:
        own.config |= {"n_group": groups, "topk_group": kept}
    if own.name == "deepseek_v2":
        own.config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"):
        own.option(name, lambda: rng.choice((6, 12, 20)), 1.0)
    for name in ("n_shared_experts", "moe_num_shared_experts"):
        own.option(name, lambda: rng.choice((1, 2, 3)), 1.0)
    own.option("first_k_dense_replace", lambda: rng.randrange(own.layers + 1), 1.0)
    own.option("moe_layer_start_index", lambda: rng.randrange(own.layers + 1), 1.0)
    own.option("moe_layer_interval", lambda: rng.choice((1, 2)))
    own.option("decoder_sparse_step", lambda: rng.choice((1, 2)))
    own.option("mlp_only_layers", lambda: rng.sample(range(own.layers), rng.randrange(own.layers)))
    own.option("mlp_layer_types", lambda: [rng.choice(("dense", "sparse")) for _ in range(own.layers)], 0.5)
    own.option("routed_scaling_factor", lambda: rng.choice((0.4, 1.0, 2.5)))
    own.option("router_jitter_noise", lambda: rng.choice((0.01, 0.2)))
    own.option("swiglu_limit", lambda: rng.choice((0.8, 1.5, 7.0)))


NOT_DRAWN = {
    *("add_cross_attention", "is_decoder", "is_encoder_decoder", "output_attentions", "output_hidden_states"),
    *(
        "return_dict",
        "use_cache",
        "tie_encoder_decoder",
        "output_router_logits",
        "use_bidirectional_attention",
    ),
    *(
        "torchscript",
        "use_return_dict",
        "summary_use_proj",
        "slow_but_exact",
        "use_mtp",
        "_remove_final_layer_norm",
    ),
}
"""Names of config.json fields that are never set in random configs: they switch additional outputs, or parts
of a model that decoders do not have.
"""
NUMBERS = (
    *("logit_scale", "embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    *("logits_scaling", "scale_depth"),
)
