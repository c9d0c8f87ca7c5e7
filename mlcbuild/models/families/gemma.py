"""The model family Gemma: Llama with scaled embeddings and norms whose weights are differences from 1."""

from __future__ import annotations

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import ACTIVATIONS, Common, ConfigRules, Family, scaled_embedding
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import RmsNorm


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    # Gemma 1.1 has both names: transformers 4 reads hidden_activation first, transformers 5 hidden_act alone.
    same = ("gelu_pytorch_tanh",) if common.feed_forward.activation == "gelu_tanh" else ()
    fields.neutral({"hidden_activation": (None, *same)}, "family 'gemma'")
    scale = scaled_embedding(fields, common.model.hidden_size)
    return common.of(common.all_alike(fields, layer), embedding_scale=scale)


FAMILY = Family(
    "gemma",
    "GemmaForCausalLM",
    _read,
    config=ConfigRules(
        norm=RmsNorm(1.0, offset=1.0),
        head_dim=256,
        defaults={"rms_norm_eps": 1e-6},
        tied=True,
        activation="gelu_pytorch_tanh",
        activations={**ACTIVATIONS, "gelu": "gelu_tanh"},
    ),
)
