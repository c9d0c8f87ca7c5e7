"""The model family GPT-2: learned positions, LayerNorm, a plain MLP, and matrices stored [in, out]."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.families import gptj
from mlcbuild.models.family import KINDS, Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm

_PARTS = {"attn.qkv": "attn.c_attn", "attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_ALL = {**_PARTS, "attn_norm": "ln_1", "mlp_norm": "ln_2"}


def _read(fields: Fields, common: Common) -> ModelConfig:
    attention = replace(common.attention, qkv_bias=True, output_bias=True)
    if not fields.flag("scale_attn_weights", True):
        attention = replace(attention, scale=1.0)
    feed_forward = replace(common.feed_forward, gated=False, bias=True)
    layer = replace(common.layer(), mixer=attention, feed_forward=feed_forward)
    layers = common.all_alike(fields, layer)
    if fields.flag("scale_attn_by_inverse_layer_idx", False):
        scales = [attention.scale / (index + 1) for index in range(common.count)]
        layers = tuple(replace(layer, mixer=replace(attention, scale=scale)) for scale in scales)
    # The fields describe how attention is computed, repeat n_positions, or configure a head that text models
    # do not have.
    fields.ignore(("reorder_and_upcast_attn", "n_ctx", "summary_activation", "summary_first_dropout"))
    fields.ignore(("summary_proj_to_labels", "summary_type", "summary_use_proj"))
    return common.of(layers, learned_positions=common.model.max_position)


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _read,
    None,
    config=ConfigRules(
        kv_heads_optional=True,
        tied=True,
        activation_field="activation_function",
        activation="gelu_new",
        norm=LayerNorm(1.0),
        defaults={"rms_norm_eps": 1e-5},
        spellings=gptj.FAMILY.config.spellings,
        wide=True,
    ),
    tensors=TensorRules(
        {
            "embed.weight": ("transformer.wte.weight",),
            "position.weight": ("transformer.wpe.weight",),
            **{f"norm.{kind}": (f"transformer.ln_f.{kind}",) for kind in KINDS},
            **{f"{norm}.{kind}": (f"{_ALL[norm]}.{kind}",) for norm in _ALL for kind in KINDS},
        },
        layers="transformer.h.",
        transposed=tuple(f"{name}.weight" for name in _PARTS),
        unused=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    ),
)
