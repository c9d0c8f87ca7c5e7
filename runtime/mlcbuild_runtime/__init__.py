"""Serves mlcbuild bundles. It requires no compiler, only the dependencies in runtime/pyproject.toml.

`Engine` and `AsyncEngine` run a bundle in this process; they are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlcbuild_runtime.local import AsyncEngine, Engine

__all__ = ["AsyncEngine", "Engine"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'mlcbuild_runtime' has no attribute '{name}'")
    # Imported by name: an import statement here would put the whole engine into the import closure, and so
    # into the cache key, of every step whose action imports anything below this package.
    return getattr(import_module("mlcbuild_runtime.local"), name)
