"""The model family GLM-4: the rotary embedding rotates pairs of neighbouring dimensions, in half of each
head."""

from __future__ import annotations

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    layer = common.layer(qkv_bias=fields.flag("attention_bias", True))
    return common.of(common.all_alike(fields, layer))


FAMILY = Family(
    "glm",
    "GlmForCausalLM",
    _read,
    RopeRules(partial=0.5, interleaved=True),
    config=ConfigRules(head_dim=128, defaults={"rms_norm_eps": 1.5625e-07, "num_key_value_heads": 2}),
    tensors=TensorRules(
        {
            "mlp.gate_up.weight": ("mlp.gate_up_proj.weight",),
        }
    ),
)
