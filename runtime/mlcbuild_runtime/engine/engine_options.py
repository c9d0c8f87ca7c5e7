"""Defines the settings of one inference engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlcbuild_format.bundle import Pooling

from mlcbuild_runtime.engine.drafts import Speculate
from mlcbuild_runtime.engine.threads import Turns

MAX_WAITING = 1024
"""Default maximum number of requests that may wait to be admitted; further ones are refused."""


@dataclass(frozen=True)
class EngineOptions:
    """The settings of one engine. None means the value that the bundle states, unless the field says
    otherwise."""

    name: str | None = None
    max_batch: int | None = None
    """Maximum number of sequences that one step of the engine computes together; None: the library's maximum.
    """
    max_waiting: int = MAX_WAITING
    """Maximum number of requests that may wait to be admitted; further ones are refused."""
    prefill_chunk: int | None = None
    """Maximum number of prompt tokens computed between two decode steps; None: the library's maximum."""
    pooling: Pooling | None = None
    """How the hidden states of a text's tokens are combined into its embedding: "last" takes that of the last
    token, "mean" the average; None: as the bundle states."""
    speculate: Speculate | None = None
    """Settings of speculative decoding; None: only predictions that clients send are drafted."""
    turns: Turns = field(default_factory=Turns)
    """The lock that an engine holds while it computes, so that only one engine of the process computes at a
    time."""
