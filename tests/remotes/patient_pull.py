"""Pulls a bundle with a timeout of 900 seconds, so that only an interrupt can end it in time: `python -m
tests.remotes.patient_pull ADDRESS DIRECTORY`."""

from __future__ import annotations

import sys

from mlcbuild.remotes import transport

if __name__ == "__main__":
    transport.TIMEOUT = 900.0
    from mlcbuild.cli import main  # after the timeout is set, which other modules copy

    sys.exit(main(["pull", *sys.argv[1:]]))
