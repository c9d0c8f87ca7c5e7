"""The settings of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlcbuild_format.bundle import Pooling

from mlcbuild_runtime.engine.drafts import Speculate
from mlcbuild_runtime.engine.threads import Turns

MAX_WAITING = 1024
"""Requests that may wait for a place by default; further ones are refused."""


@dataclass(frozen=True)
class EngineOptions:
    """None stands for the bundle's own value."""

    name: str | None = None
    max_batch: int | None = None
    """Sequences in a step."""
    max_waiting: int = MAX_WAITING
    """Requests that may wait for a place; further ones are refused."""
    prefill_chunk: int | None = None
    """Prompt tokens that are computed between two decode steps."""
    pooling: Pooling | None = None
    """How embeddings are pooled."""
    speculate: Speculate | None = None
    """None: only what clients predict is drafted."""
    turns: Turns = field(default_factory=Turns)
    """Engines of one process share it, so that one of them computes at a time."""
