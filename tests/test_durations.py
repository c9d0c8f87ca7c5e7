"""Tests of formatting durations for people."""

from __future__ import annotations

import pytest

from mlcbuild.durations import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.123, "0.12 s"),
        (8.06, "8.1 s"),
        (59.9, "59.9 s"),
        (184, "3 min 04 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
