"""Helpers for tests of damaged bundles: the type of the functions that damage one, and functions that return
the error message with which it is then refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from mlcbuild_format import bundle
from mlcbuild_format.errors import BundleError

from . import shared

Damage = Callable[[Path], None]


def refusal(path: Path) -> str:
    with pytest.raises(BundleError) as caught:
        bundle.check(path)
    assert str(caught.value).isprintable()
    return str(caught.value)


def started(path: Path) -> str:
    """Starts a server with a bundle that it must refuse. Asserts that it ends with exit code 1 and one line
    on standard error, and returns that line."""
    result = shared.run("-m", "mlcbuild_runtime", str(path), "--port", "0")
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"mlcbuild-serve: [^\n]+\n", result.stderr), result.stderr
    return result.stderr
