"""Parses and formats sizes in bytes, such as "8 GiB"."""

from __future__ import annotations

import re

_UNITS = ("B", "kB", "MB", "GB", "TB")


def parse(text: str) -> int:
    """Returns the number of bytes that a text states, rounded down: a number >= 0 such as 20 or 1.5, alone or
    with one of the units B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), with or
    without the B, after at most one space; case is ignored. Raises ValueError for another text."""
    parts = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?) ?([kmgt]?)(i?)b?", text, re.IGNORECASE | re.ASCII)
    if parts is None or (parts[3] and not parts[2]):
        raise ValueError(f"must be a size such as 8GB or 512MiB, found '{text}'")
    return int(float(parts[1]) * (1024 if parts[3] else 1000) ** " kmgt".index(parts[2].lower() or " "))


def show(count: float) -> str:
    """Returns a number of bytes as a short text for people, such as 812 B, 3.1 MB or 16.4 GB, with powers of
    1000 up to TB."""
    step = 0
    while count >= 1000 and step < len(_UNITS) - 1:
        count, step = count / 1000, step + 1
    return f"{count:.0f} B" if step == 0 else f"{count:.1f} {_UNITS[step]}"
