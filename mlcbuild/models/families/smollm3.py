"""The model family SmolLM3: Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, layer_windows, unrotated, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import LAYER_KINDS, RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    feed_forward = replace(common.feed_forward, bias=fields.flag("mlp_bias", False))
    layer = replace(layer, feed_forward=feed_forward)
    fields.ignore(("max_window_layers",))  # transformers does not read it
    step = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.switches("no_rope_layers", [bool((index + 1) % step) for index in range(common.count)])
    window = fields.maybe_integer("sliding_window", None)
    full, sliding = LAYER_KINDS
    if not fields.flag("use_sliding_window", False):
        window = None
        fields.ignore(("layer_types",))
        kinds = [full] * common.count
    else:
        kinds = [full if is_rotated or window is None else sliding for is_rotated in rotated]
    windows = (None,) * common.count if window is None else layer_windows(fields, kinds, window)
    return common.of(unrotated(windowed(layer, windows), rotated))


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    _read,
    RopeRules(theta=2e6),
    config=ConfigRules(tied=True, defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 4}),
)
