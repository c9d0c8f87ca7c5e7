"""The model family EXAONE 4: attention and feed-forward of a layer each have a norm after them only; in
models with attention windows, layers without a window have no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import (
    POST_NORMS,
    Common,
    ConfigRules,
    Family,
    TensorRules,
    every,
    layer_windows,
    unrotated,
    windowed,
)
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import Norms
from mlcbuild.models.rope import LAYER_KINDS


def _read(fields: Fields, common: Common) -> ModelConfig:
    layer = replace(common.layer(qk_norm=common.norm), norms=Norms(None, common.norm))
    window = fields.maybe_integer("sliding_window", 4096)
    kinds = [LAYER_KINDS[0]] * common.count
    if fields.has("layer_types"):
        fields.ignore(("sliding_window_pattern",))  # Published configs write the kinds of layers as letters.
    elif window is None:
        fields.ignore(("sliding_window_pattern",))
    else:
        kinds = every(fields.integer("sliding_window_pattern", 4), common.count)
    windows = layer_windows(fields, kinds, window)
    rotated = [window is None or size is not None for size in windows]
    return common.of(unrotated(windowed(layer, windows), rotated))


FAMILY = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    _read,
    config=ConfigRules(defaults={"rms_norm_eps": 1e-5}),
    tensors=TensorRules(POST_NORMS),
)
