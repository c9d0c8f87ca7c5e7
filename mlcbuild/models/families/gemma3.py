"""The model family Gemma 3 with a vision tower; only the text model is built."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.families import gemma3_text
from mlcbuild.models.family import Common
from mlcbuild.models.fields import Fields


def _read(fields: Fields, common: Common) -> ModelConfig:
    if fields.has("final_logit_softcapping"):
        fields.problem(
            "final_logit_softcapping", "must be null: beside a vision tower, transformers ignores it"
        )
    return gemma3_text.FAMILY.read(fields, common)


FAMILY = replace(
    gemma3_text.FAMILY,
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    texts=(replace(gemma3_text.FAMILY, read=_read),),
)
