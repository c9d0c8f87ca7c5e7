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
    """Maximum number of sequences that one step of the engine computes together; None: the maximum of the
    bundle's library, which a larger number does not exceed, either."""
    max_waiting: int = MAX_WAITING
    """Maximum number of requests that may wait to be admitted; further ones are refused."""
    prefill_chunk: int | None = None
    """Maximum number of prompt tokens computed between two decode steps; None: the maximum of the bundle's
    library, which a larger number does not exceed, either."""
    pooling: Pooling | None = None
    """How the hidden states of a text's tokens are combined into its embedding: "last" takes that of the last
    token, "mean" the average; None: as the bundle states."""
    speculate: Speculate | None = None
    """Settings of speculative decoding; None: only predictions that clients send are drafted."""
    turns: Turns = field(default_factory=Turns)
    """The lock that an engine holds while it computes. Of the engines that share one, only one computes at a
    time; the default is a new lock, which no other engine has."""
