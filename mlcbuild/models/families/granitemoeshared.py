"""The model family Granite 3 with experts, and one feed-forward beside them that every token uses."""

from __future__ import annotations

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.families.granitemoe import NAMES, read
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields


def _read(fields: Fields, common: Common) -> ModelConfig:
    return read(fields, common, fields.integer("shared_intermediate_size", 0, low=0, high=2**22))


FAMILY = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    _read,
    config=ConfigRules(kv_heads_optional=True),
    tensors=TensorRules(NAMES),
)
