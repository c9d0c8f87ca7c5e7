"""The model family OPT: learned positions, LayerNorm and a plain MLP of ReLU."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("enable_bias", True)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    layer = replace(layer, feed_forward=replace(common.feed_forward, gated=False, bias=has_bias))
    hidden = common.model.hidden_size
    family = "family 'opt'"
    on = ("do_layer_norm_before", "layer_norm_elementwise_affine")
    fields.neutral(dict.fromkeys(on, (True,)), family)
    fields.neutral({"_remove_final_layer_norm": (False,), "word_embed_proj_dim": (None, hidden)}, family)
    fields.ignore(("dropout", "layerdrop", "init_std", "activation_dropout", "output_projection"))
    offset, positions = 2, common.model.max_position
    return common.of(
        common.all_alike(fields, layer), learned_positions=positions + offset, position_offset=offset
    )


FAMILY = Family(
    "opt",
    "OPTForCausalLM",
    _read,
    None,
    config=ConfigRules(
        kv_heads_optional=True,
        tied=True,
        activation_field="activation_function",
        activation="relu",
        norm=LayerNorm(1.0),
        defaults={"rms_norm_eps": 1e-5},
        spellings={"ffn_dim": "intermediate_size"},
    ),
    tensors=TensorRules(
        {
            **{f"norm.{kind}": (f"model.decoder.final_layer_norm.{kind}",) for kind in ("weight", "bias")},
            "embed.weight": ("model.decoder.embed_tokens.weight",),
            "position.weight": ("model.decoder.embed_positions.weight",),
            **{f"attn_norm.{kind}": (f"self_attn_layer_norm.{kind}",) for kind in ("weight", "bias")},
            **{f"mlp_norm.{kind}": (f"final_layer_norm.{kind}",) for kind in ("weight", "bias")},
            **{f"attn.o.{kind}": (f"self_attn.out_proj.{kind}",) for kind in ("weight", "bias")},
            **{f"mlp.up.{kind}": (f"fc1.{kind}",) for kind in ("weight", "bias")},
            **{f"mlp.down.{kind}": (f"fc2.{kind}",) for kind in ("weight", "bias")},
        },
        layers="model.decoder.layers.",
    ),
)
