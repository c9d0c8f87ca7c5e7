"""Gemma 3 with a vision tower, of which text needs nothing."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.families import gemma3_text

FAMILY = replace(
    gemma3_text.FAMILY,
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    texts=(gemma3_text.FAMILY,),
)
