"""The model family Mistral: Llama without biases, with one attention window for all layers or with none."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, Family, same_window, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms


def _read(fields: Fields, common: Common) -> ModelConfig:
    # transformers reads an absent field as 4096; null means no window.
    window = fields.maybe_integer("sliding_window", 4096)
    layer = LayerSpec(common.attention, common.feed_forward, Norms(common.norm))
    return replace(common.model, layers=windowed(layer, same_window(fields, common.count, window)))


FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    _read,
)
