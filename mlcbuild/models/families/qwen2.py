"""The model family Qwen2 and Qwen2.5: Llama with biases on query, key and value; upper layers may have an
attention window."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, Family, layer_windows, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import LAYER_KINDS


def _read(fields: Fields, common: Common) -> ModelConfig:
    attention = replace(common.attention, qkv_bias=True)
    layer = LayerSpec(attention, common.feed_forward, Norms(common.norm))
    return replace(common.model, layers=windowed(layer, upper_windows(fields, common.count)))


def upper_windows(fields: Fields, count: int) -> tuple[int | None, ...]:
    """Returns the attention window, in tokens, of each of `count` layers; None: no window. In config.json,
    use_sliding_window turns windows of sliding_window tokens on, for layers from max_window_layers on or, if
    layer_types is present, for those that it lists as sliding_attention. A missing or wrong field adds an
    error message to `fields`, the reader of config.json."""
    fields.ignore(("sliding_window", "max_window_layers"))
    full, sliding = LAYER_KINDS
    if not fields.flag("use_sliding_window", False):
        return layer_windows(fields, [full] * count, None)
    window = fields.integer("sliding_window")
    # If layer_types lists every layer, transformers ignores max_window_layers.
    first = count if fields.has("layer_types") else fields.integer("max_window_layers", low=0)
    return layer_windows(fields, [sliding if i >= first else full for i in range(count)], window)


FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    _read,
)
