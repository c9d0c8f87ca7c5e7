"""Test cases of model configs: those of the golden checkpoints, and changes to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlcbuild.models import (
    Attention,
    ModelConfig,
)
from tests.configs import attention_of

GOLDEN = Path(__file__).parent.parent / "golden"
VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
Config = dict[str, Any]


def golden(variant: str) -> Config:
    document: Config = json.loads((GOLDEN / variant / "config.json").read_text())
    return document


def attention(config: ModelConfig) -> Attention:
    """Returns the attention block of a config's first layer."""
    return attention_of(config.layers[0])


LLAMA3 = golden("llama-llama3-gqa")["rope_scaling"]
YARN = golden("llama-yarn")["rope_parameters"]
LONGROPE = golden("phi3-longrope-long")["rope_scaling"]
