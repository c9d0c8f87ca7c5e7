"""Tests of the versions of TVM and LLVM: what is read, and which installations are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace

import pytest

from mlcbuild.compiler import versions
from mlcbuild.errors import SetupError


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    """Clears the cached version number of the installed compiler before and after each test, so that it is
    read again."""
    versions._installed.cache_clear()
    yield
    versions._installed.cache_clear()


def test_the_version_is_that_of_the_installed_package() -> None:
    assert versions.compiler() == {"apache-tvm": metadata.version("apache-tvm"), "llvm": versions.LLVM}


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(SetupError, match="the compiler is not installed: `pip install mlcbuild` installs"):
        versions.compiler()


def test_another_llvm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llvm = SimpleNamespace(llvm_version_major=lambda: int(versions.LLVM))
    monkeypatch.setitem(sys.modules, "tvm.target.codegen", llvm)
    versions.check()
    llvm.llvm_version_major = lambda: int(versions.LLVM) + 1
    monkeypatch.setattr(metadata, "version", lambda name: "9.9")
    message = f"this apache-tvm 9.9 carries LLVM {int(versions.LLVM) + 1}, not LLVM {versions.LLVM}: install"
    with pytest.raises(SetupError, match=message):
        versions.check()
