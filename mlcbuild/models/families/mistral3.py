"""The model family Mistral Small 3.1 and later: a text model beside a vision tower; only the text model is
built."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.families import ministral3, mistral

_CONFIG = replace(mistral.FAMILY.config, defaults={"rms_norm_eps": 1e-6})

FAMILY = replace(
    mistral.FAMILY,
    name="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    texts=(replace(mistral.FAMILY, config=_CONFIG), ministral3.FAMILY),
)
