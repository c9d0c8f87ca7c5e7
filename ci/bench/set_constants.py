"""Replaces tuned constants of mlcbuild by other values in a benchmark's process, to measure how much they
matter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module

PACKAGES = ("mlcbuild", "mlcbuild_format", "mlcbuild_runtime")


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="MODULE.NAME=VALUE",
        help="measure with another value of a constant, such as mlcbuild.remotes.ranges.AHEAD=3",
    )


def apply(settings: Iterable[str]) -> None:
    """Sets constants to other values: each in its module, and in every loaded module that has imported it by
    name.

    settings: texts MODULE.NAME=VALUE with the full name of the module, such as
    mlcbuild.remotes.ranges.AHEAD=3; an integer constant needs an integer. Raises SystemExit, which ends the
    program with a message, for a constant that does not exist or is not a number, and for a value that is not
    a number."""
    for text in settings:
        place, _, value = text.partition("=")
        module_name, _, name = place.rpartition(".")
        try:
            present = vars(import_module(module_name))[name]
            if type(present) not in (int, float):
                raise TypeError(f"it is {present!r}")
            new = type(present)(value)
        except (ImportError, KeyError, TypeError, ValueError) as error:
            raise SystemExit(f"--set {text}: the name of a number and a number are needed: {error}") from None
        _assign(name, present, new)


def _assign(name: str, present: object, new: object) -> None:
    for loaded, module in list(sys.modules.items()):
        if loaded.partition(".")[0] in PACKAGES and vars(module).get(name) == present:
            setattr(module, name, new)


@contextmanager
def replaced(module_name: str, name: str, value: object) -> Iterator[None]:
    """Returns a context in which the constant `name` of the module `module_name` (full name, imported if
    necessary) has another value, there and in every loaded module of mlcbuild that has imported it by name.
    The old value returns at the end, also after an exception. Entering the context raises KeyError if the
    module has no such constant, ImportError if there is no such module."""
    present = vars(import_module(module_name))[name]
    places = [
        module
        for loaded, module in list(sys.modules.items())
        if loaded.partition(".")[0] in PACKAGES and vars(module).get(name) == present
    ]
    for module in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module in places:
            setattr(module, name, present)
