"""The model family Hunyuan (dense): Llama with norms of queries and keys after their rotation."""

from __future__ import annotations

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, Names, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules

NAMES: Names = {
    "attn.q_norm.weight": ("self_attn.query_layernorm.weight",),
    "attn.k_norm.weight": ("self_attn.key_layernorm.weight",),
}

_ALONE = {
    "norm_type": ("rms",),
    "use_cla": (False,),
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
}
"""Field of Hunyuan's config.json that transformers ignores -> values that agree with what it computes; any
other value adds an error message."""


def read(fields: Fields, common: Common) -> ModelConfig:
    """Returns the model that Hunyuan's config.json describes, with a dense feed-forward in each layer, which
    the family with experts then replaces. fields: the reader of config.json, which collects error messages;
    common: what the fields that all families share describe."""
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias, qk_norm=common.norm, qk_norm_last=True)
    fields.ignore(
        ("eod_token_id", "sep_token_id", "im_end_id", "im_newline_id", "im_start_id", "text_end_id")
    )
    fields.ignore(("text_start_id", "add_classification_head", "pool_type", "class_num", "org_vocab_size"))
    fields.ignore(("cla_share_factor", "dense_list", "mask_init_id", "pad_id"))
    fields.neutral(_ALONE, f"family '{common.model.family}'")
    return common.of(common.all_alike(fields, layer))


FAMILY = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    read,
    RopeRules(extensions=("alpha",)),
    config=ConfigRules(
        kv_heads_optional=True,
        defaults={"rms_norm_eps": 1e-5},
        spellings={"attention_head_dim": "head_dim"},
    ),
    tensors=TensorRules(NAMES),
)
