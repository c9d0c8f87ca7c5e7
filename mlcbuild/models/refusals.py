"""Lists model types that are not supported with the kind of layer that each of them needs, and fields of
config.json that show such a need."""

from __future__ import annotations

from collections.abc import Mapping

_STATE = "recurrent state (a state-space or linear-attention layer)"
_CONVOLUTION = "short convolutions over positions"
_HEADS = "heads whose size or number differs between layers"
_INDEXER = "a sparse indexer (a selection of the keys that attention reads)"
_SHARED = "embeddings for each layer, and layers that share keys"
_ENCODER = "an encoder beside the decoder"
_LATER = "attention to later positions"
_GATES = "gates on the output of attention"
_LOOPS = "layers that are computed several times"
NEEDED: Mapping[str, str] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h"), _STATE),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "minimax", "plamo2", "recurrent_gemma"), _STATE),
    **dict.fromkeys(("zamba", "zamba2"), _STATE),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "olmo_hybrid", "rwkv", "xlstm"), _STATE),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _STATE),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl", "lfm3", "lfm3_vl"), _CONVOLUTION),
    **dict.fromkeys(("gemma4", "gemma4_text", "mimo_v2_flash", "openelm"), _HEADS),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _SHARED),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _INDEXER),
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "led", "m2m_100", "marian", "mbart"), _ENCODER),
    **dict.fromkeys(("mt5", "mvp", "pegasus", "plbart", "t5", "t5gemma", "t5gemma2"), _ENCODER),
    **dict.fromkeys(("umt5", "whisper"), _ENCODER),
    **dict.fromkeys(("bert", "camembert", "deberta", "distilbert", "electra", "ernie", "modernbert"), _LATER),
    **dict.fromkeys(("rembert", "roberta", "roformer", "xlm", "xmod"), _LATER),
    **dict.fromkeys(("afmoe", "beam", "laguna", "step3p7"), _GATES),
    **dict.fromkeys(("dory", "hrm_text"), _LOOPS),
    "blt": "patches of bytes in place of tokens",
    "diffllama": "differences of two attentions",
    "jetmoe": "experts in attention",
    "longcat_flash": "layers with two attentions",
    "mllama": "attention to images in the text model",
    "reformer": "attention by hashes of keys",
    "zaya": _CONVOLUTION,
    **dict.fromkeys(("llama4", "llama4_text"), "attention in chunks of positions"),
}
"""Unsupported model_type -> the kind of layer that it needs and that this project does not implement, in
words for messages."""

CODE_ALONE = ("internlm2", "minicpm")
"""Model types that are refused because only the code in their checkpoints defines them: transformers has no
implementation to compare with."""
SIGNS: Mapping[str, str] = {
    **dict.fromkeys(("linear_conv_kernel_dim", "mamba_d_state", "ssm_state_size", "state_size"), _STATE),
    **dict.fromkeys(("linear_attention", "mamba", "recurrent", "time_step_rank"), _STATE),
    **dict.fromkeys(("conv", "conv_L_cache", "conv_kernel_size"), _CONVOLUTION),
    **dict.fromkeys(("index_head_dim", "index_n_heads", "index_topk"), _INDEXER),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), _SHARED),
    **dict.fromkeys(("global_head_dim", "num_attention_heads_per_layer"), _HEADS),
    "n_recurrent_loops": _LOOPS,
}
"""Field of a config.json, or entry of its layer_types, that no model family reads -> the unsupported kind of
layer that it indicates, in words for messages."""


def refusal(name: str, values: Mapping[str, object], families: tuple[str, ...]) -> str:
    """Returns the reason why a model_type that is not in `families` cannot be built, such as "it needs ...,
    which mlcbuild cannot compute"; for an unknown one without signs of such a layer, "supported: " and the
    names in `families`. name: the model_type; values: the fields of config.json."""
    if name in NEEDED:
        return f"it needs {NEEDED[name]}, which mlcbuild cannot compute"
    if name in CODE_ALONE:
        return "only code in its checkpoints defines it: transformers ships no model of this name"
    if block := missing_block(values):
        return block[1]
    # The message suggests no similar name: config.json comes with the weights, and a similar family computes
    # something else.
    return f"supported: {', '.join(families)}"


def missing_block(values: Mapping[str, object]) -> tuple[str, str] | None:
    """Returns (name of a field of config.json or of its text_config, error message) for the first field that
    shows that the model has a kind of layer which mlcbuild does not implement; None if there is none. Fields
    that are null, 0, false or empty are ignored. values: the fields of config.json."""
    inner = values.get("text_config")
    for fields in (values, inner if isinstance(inner, Mapping) else {}):
        kinds = fields.get("layer_types")
        named = [(name, name) for name, value in fields.items() if value]
        named += [("layer_types", kind) for kind in (kinds if isinstance(kinds, list) else ())]
        for name, sign in named:
            if isinstance(sign, str) and sign in SIGNS:
                return (
                    name,
                    f"'{sign}' says that the model needs {SIGNS[sign]}, which mlcbuild cannot compute",
                )
    return None
