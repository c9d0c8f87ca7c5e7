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

_VISION = (
    *("anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "image_token_id"),
    *("num_media_embeds", "skip_cls_token", "video_end_id", "video_start_id", "vit_add_patchemb_bias"),
    *("vit_input_resolution", "vit_mapping_type", "vit_norm_type", "vit_patch", "vit_path"),
    *("vit_remove_prenorm", "vit_token", "vit_type", "vit_used_rms_norm"),
)
"""Fields of config.json that describe a vision tower, which computes no text; published models lack it."""
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
    fields.ignore(("cla_share_factor", "dense_list", "mask_init_id", "pad_id", *_VISION))
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
