"""The model family Falcon, with both decoder architectures: LayerNorm, plain MLP, rotary or ALiBi."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import KINDS, MEGATRON, Common, ConfigRules, Family, Names, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm, LayerSpec, Norms, Residual


def _read(fields: Fields, common: Common) -> ModelConfig:
    is_new, has_bias = fields.flag("new_decoder_architecture", False), fields.flag("bias", False)
    attention = replace(common.attention, qkv_bias=has_bias, output_bias=has_bias)
    count = fields.integer("num_ln_in_parallel_attn", 1 + is_new, high=2)
    is_parallel = fields.flag("parallel_attn", True)
    if not is_new and fields.flag("multi_query", True):
        attention = replace(attention, kv_heads=1)
    fields.ignore(("multi_query", "apply_residual_connection_post_layernorm", "ff_factor", "max_seq_len"))
    residual: Residual = "parallel_shared" if is_parallel else "sequential"
    if (is_new and not is_parallel) or (not is_new and count == 2):
        fields.problem("num_ln_in_parallel_attn", "two norms need parallel_attn and new_decoder_architecture")
    elif count == 2:
        residual = "parallel"
    feed_forward, ropes = replace(common.feed_forward, gated=False, bias=has_bias), common.model.ropes
    if fields.flag("alibi", False):
        attention, ropes = replace(attention, rope=None, alibi="bfloat16"), ()
    layer = LayerSpec(attention, feed_forward, Norms(common.norm), residual)
    return common.of(common.all_alike(fields, layer), ropes=ropes)


def _names(config: ModelConfig) -> Names:
    names = {
        "embed.weight": ("transformer.word_embeddings.weight",),
        **{f"norm.{kind}": (f"transformer.ln_f.{kind}",) for kind in KINDS},
        **MEGATRON,
    }
    halves = ("attn", "mlp") if config.layers[0].residual == "parallel" else ()
    return names | {f"{half}_norm.{kind}": (f"ln_{half}.{kind}",) for half in halves for kind in KINDS}


FAMILY = Family(
    "falcon",
    "FalconForCausalLM",
    _read,
    config=ConfigRules(
        kv_heads_optional=True,
        tied=True,
        activation_field="activation",
        activation="gelu",
        norm=LayerNorm(1.0),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        spellings={"num_kv_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size"}
        | {"layer_norm_epsilon": "rms_norm_eps", "n_embed": "hidden_size"},
        wide=True,
    ),
    tensors=TensorRules(_names, layers="transformer.h.", fused_heads=True),
    remote_code=True,
)
