"""The model family MiniCPM3: latent attention, and scalars on embeddings, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields
from mlcbuild.models.latent_fields import SPELLINGS, read_latent
from mlcbuild.models.layers import LayerSpec, Norms


def _read(fields: Fields, common: Common) -> ModelConfig:
    hidden = common.model.hidden_size
    attention = read_latent(fields, common, (256, 768, 64, max(1, hidden // common.attention.heads)))
    depth = fields.maybe_number("scale_depth", 1.4)
    residual = 1.0 if depth is None else depth / sqrt(common.count)
    base = fields.maybe_integer("dim_model_base", 256)
    layer = LayerSpec(attention, common.feed_forward, Norms(common.norm), residual_scale=residual)
    return replace(
        common.model,
        layers=(layer,) * common.count,
        embedding_scale=fields.number("scale_emb", 12.0),
        logit_scale=1.0 if base is None else base / hidden,
    )


FAMILY = Family(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    _read,
    config=ConfigRules(
        head_dim=32, kv_heads_optional=True, tied=True, defaults={"rms_norm_eps": 1e-5}, spellings=SPELLINGS
    ),
    remote_code=True,
)
