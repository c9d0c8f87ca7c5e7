"""The model family GPT-J: attention and feed-forward of a layer read one LayerNorm; the rotary embedding
rotates pairs of neighbouring dimensions, in a part of each head."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import KINDS, Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    feed_forward = replace(common.feed_forward, gated=False, bias=True)
    layer = replace(common.layer(), feed_forward=feed_forward, residual="parallel_shared")
    fields.ignore(("summary_activation", "summary_first_dropout", "summary_proj_to_labels"))
    fields.ignore(
        ("summary_type", "summary_use_proj", "scale_attn_weights", "rotary", "gradient_checkpointing")
    )
    return common.of(common.all_alike(fields, layer), head_bias=True)


FAMILY = Family(
    "gptj",
    "GPTJForCausalLM",
    _read,
    RopeRules(rotary_dim=True, interleaved=True),
    config=ConfigRules(
        kv_heads_optional=True,
        activation_field="activation_function",
        activation="gelu_new",
        norm=LayerNorm(1.0),
        defaults={"rms_norm_eps": 1e-5, "rotary_dim": 64},
        spellings={
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_inner": "intermediate_size",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        wide=True,
    ),
    tensors=TensorRules(
        {
            "embed.weight": ("transformer.wte.weight",),
            **{f"norm.{kind}": (f"transformer.ln_f.{kind}",) for kind in KINDS},
            **{f"attn_norm.{kind}": (f"ln_1.{kind}",) for kind in KINDS},
            "attn.qkv.weight": ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"),
            "attn.o.weight": ("attn.out_proj.weight",),
            **{f"mlp.up.{kind}": (f"mlp.fc_in.{kind}",) for kind in KINDS},
            **{f"mlp.down.{kind}": (f"mlp.fc_out.{kind}",) for kind in KINDS},
        },
        layers="transformer.h.",
        unused=r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",
    ),
)
