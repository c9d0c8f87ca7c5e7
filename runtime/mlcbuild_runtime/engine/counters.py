"""Counts all work that one engine has done since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counts of the work that one engine has done since its start. Only the engine's thread writes them;
    other threads may read single numbers."""

    prompt_tokens: int = 0
    """Number of prompt tokens that the engine has computed. Those read from the prefix cache do not count;
    those computed again after a preemption count again."""
    answer_tokens: int = 0
    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
