"""Types of the values of command-line options, in chats and servers. argparse names a type in the error about
a value that it cannot read ("invalid positive value: 'x'"), so they have plain names."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> int:
    """Returns the whole number that a text states, at least 1. Raises ArgumentTypeError for a smaller one,
    ValueError for another text."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """Returns the whole number that a text states, at least 0. Raises ArgumentTypeError for a smaller one,
    ValueError for another text."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, found {text}")
    return number


def seconds(text: str) -> float:
    """Returns the finite number of seconds that a text states, at least 0. Raises ArgumentTypeError for
    another number, ValueError for another text."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, found {text}")
    return number
