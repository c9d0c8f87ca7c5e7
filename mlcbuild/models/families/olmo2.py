"""The model family OLMo 2: attention and feed-forward of a layer each have a norm after them only; one norm
spans all query heads, another all key heads."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import POST_NORMS, Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import Norms


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias, qk_norm=common.norm, qk_norm_span="heads")
    layer = replace(layer, norms=Norms(None, common.norm))
    return common.of(common.all_alike(fields, layer))


FAMILY = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    _read,
    config=ConfigRules(kv_heads_optional=True, defaults={"rms_norm_eps": 1e-5}),
    tensors=TensorRules(POST_NORMS),
)
