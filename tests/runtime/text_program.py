"""Runs a Python program that is passed as text: `python -m tests.runtime.text_program TEXT ARGUMENT...`.

It does what `python -c` does, in a process that the fork server may start. All modules are imported before,
so a text may replace functions, but not constants that modules have copied.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    text = sys.argv.pop(1)
    exec(text, {"__name__": "__main__"})
