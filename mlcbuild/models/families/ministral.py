"""The model family Ministral: Mistral with an attention window in those layers that layer_types in
config.json lists as sliding_attention, or in all if it is absent."""

from __future__ import annotations

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, layer_windows, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import LAYER_KINDS


def _read(fields: Fields, common: Common) -> ModelConfig:
    window = fields.maybe_integer("sliding_window", 4096)
    kind = LAYER_KINDS[0] if window is None else LAYER_KINDS[1]
    windows = layer_windows(fields, [kind] * common.count, window)
    return common.of(windowed(common.layer(), windows))


FAMILY = Family(
    "ministral",
    "MinistralForCausalLM",
    _read,
    config=ConfigRules(defaults={"rms_norm_eps": 1e-6}),
)
