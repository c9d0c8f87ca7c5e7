"""Tests of the text that describes the speed of an answer."""

from __future__ import annotations

import pytest
from mlcbuild_runtime.chat.chat_model import FEWEST, Speed


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (Speed(), "no answer yet"),
        (Speed(9, 3, 2.0), "no answer yet"),
        (Speed(9, answer_tokens=1), "prompt 9 tokens; answer 1 tokens"),
        (
            Speed(20, 4, 2.0, 33, 4.0),
            "prompt 20 tokens (4 cached), first token after 2.00 s (8.0 tok/s); answer 33 tokens (8.0 tok/s)",
        ),
        (
            Speed(19, 4, 2.0, 15, 4.0),
            "prompt 19 tokens (4 cached), first token after 2.00 s; answer 15 tokens",
        ),
        (Speed(16, 0, 0.0, 16, 0.0), "prompt 16 tokens, first token after 0.00 s; answer 16 tokens"),
    ],
)
def test_a_rate_counts_what_was_computed(speed: Speed, text: str) -> None:
    """Checks the text about an answer's speed: cached tokens do not count as computed, the rate of an answer
    of n tokens is computed from n - 1 intervals, and fewer than 16 tokens have no rate."""
    assert FEWEST == 16 and str(speed) == text
