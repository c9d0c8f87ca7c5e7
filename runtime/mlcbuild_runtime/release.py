"""Defines the version of the distribution mlcbuild-runtime, and the option --version."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the option --version to a command-line parser."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed()}")


def installed() -> str:
    """Returns the version of the installed distribution mlcbuild-runtime; "from source" where it is not
    installed, as in a checkout."""
    try:
        return version("mlcbuild-runtime")
    except PackageNotFoundError:
        return "from source"
