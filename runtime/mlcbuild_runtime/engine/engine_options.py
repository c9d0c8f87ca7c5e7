"""What makes one engine differ from others."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlcbuild_format.bundle import Pooling

from mlcbuild_runtime.devices.threads import Turns
from mlcbuild_runtime.engine.drafts import Speculate


@dataclass(frozen=True)
class Role:
    """One engine among others. None: as its bundle has it."""

    name: str | None = None
    pooling: Pooling | None = None
    """Of embeddings."""
    prefill_chunk: int | None = None
    """Tokens of prompts that are computed between two steps of answers."""
    speculate: Speculate | None = None
    """Draft tokens, and how."""
    turns: Turns = field(default_factory=Turns)
    """Engines of one process share it, so that one of them computes at a time."""
