"""The model family Command R7B and A: Command R with attention windows; layers without a window have no
rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, every, layer_windows, unrotated, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    layer = replace(layer, residual="parallel_shared")
    kinds = every(fields.integer("sliding_window_pattern", 4), common.count)
    windows = layer_windows(fields, kinds, fields.maybe_integer("sliding_window", 4096))
    fields.ignore(("order_of_interleaved_layers", "position_embedding_type", "rotary_pct"))
    # Cohere's own code reads these fields, transformers none of them.
    always = ("use_embedding_sharing", "use_gated_activation", "use_parallel_block")
    fields.neutral(dict.fromkeys(always, (True,)), "family 'cohere2'")
    fields.ignore(("layer_switch", "use_parallel_embedding"))
    return common.of(
        unrotated(windowed(layer, windows), [window is not None for window in windows]),
        logit_scale=fields.number("logit_scale", 0.0625),
    )


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    _read,
    RopeRules(interleaved=True),
    config=ConfigRules(
        kv_heads_optional=True,
        tied=True,
        norm=LayerNorm(1.0, bias=False),
        defaults={"rms_norm_eps": 1e-5},
        spellings={"layer_norm_eps": "rms_norm_eps"},
    ),
)
