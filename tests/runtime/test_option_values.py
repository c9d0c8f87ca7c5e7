"""Tests of the values of command-line options."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest
from mlcbuild_runtime.option_values import natural, positive, seconds


def test_values_within_the_limits() -> None:
    assert (positive("1"), natural("0"), seconds("0"), seconds("2.5")) == (1, 0, 0.0, 2.5)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (positive, "0", "must be at least 1, found 0"),
        (natural, "-1", "must be at least 0, found -1"),
        (seconds, "-1", "must be a number of seconds, found -1"),
        (seconds, "inf", "must be a number of seconds, found inf"),
        (seconds, "nan", "must be a number of seconds, found nan"),
    ],
)
def test_values_beyond_the_limits(read: Callable[[str], float], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        read(text)
