"""What an engine has done since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Written by the engine's thread; other threads read single numbers."""

    prompt_tokens: int = 0
    """Prompt tokens that were computed, and not read from the prefix cache."""
    answer_tokens: int = 0
    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
