"""The model family OLMo 3: OLMo 2 with an attention window in three of four layers. The rotary embedding of
the layers with a window is not scaled."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import POST_NORMS, Common, ConfigRules, Family, TensorRules, every, layer_windows
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias, qk_norm=common.norm, qk_norm_span="heads")
    layer = replace(layer, norms=Norms(None, common.norm))
    windows = layer_windows(fields, every(4, common.count), fields.maybe_integer("sliding_window", 4096))
    return common.of(common.by_kind(layer, windows))


FAMILY = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    _read,
    RopeRules(by_kind=True, theta=5e5),
    config=ConfigRules(kv_heads_optional=True, defaults={"rms_norm_eps": 1e-5}),
    tensors=TensorRules(POST_NORMS),
)
