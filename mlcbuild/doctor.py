"""Checks whether this machine has what builds need, such as a linker and a writable store. Each check has a
result, a `Check`, with a name, whether it passed, and a message; a failed one raises no exception."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild import machine
from mlcbuild.compiler.cpu.toolchain import linker_identity
from mlcbuild.errors import MlcbuildError, SetupError, StoreError
from mlcbuild.store.store import default_root
from mlcbuild.targets.backends import backend
from mlcbuild.targets.presets import HOST, presets, resolve


@dataclass(frozen=True)
class Check:
    """The result of one check of this machine, such as whether a linker is installed."""

    name: str
    ok: bool
    message: str


def checks(store: Path | None = None) -> list[Check]:
    """Checks Python, cores and memory, processor, compiler, linker, target presets and store of this machine,
    and returns a result for each, in the order in which they are printed. A failed check is such a result,
    not an exception. store: root of the artifact store; None: the user's default store."""
    return [_attempt(name, check, store) for name, check in CHECKS.items()]


def _attempt(name: str, check: Callable[[Path | None], str], store: Path | None) -> Check:
    try:
        return Check(name, True, check(store))
    except (MlcbuildError, OSError, PackageNotFoundError) as error:
        return Check(name, False, str(error))


def _python(_: Path | None) -> str:
    return f"{platform.python_version()} at {sys.executable}"


def _machine(_: Path | None) -> str:
    return f"{machine.cores()} cores, {sizes.show(machine.memory())} to share among steps"


def _host(_: Path | None) -> str:
    host = resolve(HOST)
    return f"{host.triple} {host.cpu} {' '.join(host.features)}".rstrip()


def _compiler(_: Path | None) -> str:
    return f"apache-tvm {version('apache-tvm')}"


def _linker(_: Path | None) -> str:
    return linker_identity(resolve(HOST))


def _crosses(_: Path | None) -> str:
    """Returns a text that lists the target presets for which this machine can build, and those for which it
    lacks a tool, such as "can build for a, b; not for c". It raises nothing if it can build for none: the
    text then begins with "can build for none"."""

    def can_build(name: str) -> bool:
        target = presets()[name]
        try:
            backend(target).tool_versions(target)
        except SetupError:
            return False
        return True

    names: Mapping[bool, list[str]] = {True: [], False: []}
    for name in presets():
        names[can_build(name)].append(name)
    without = f"; not for {', '.join(names[False])}" if names[False] else ""
    return f"can build for {', '.join(names[True]) or 'none'}{without}"


def _store(store: Path | None) -> str:
    root = store or default_root()
    place = root
    while not place.exists():
        place = place.parent
    try:
        # Checking permissions does not suffice: a filesystem may still refuse to write.
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        why = f"{root}: cannot be written ({error.strerror})"
        raise StoreError(f"{why}; set MLCBUILD_STORE to a directory of yours") from None
    return f"{root} ({sizes.show(shutil.disk_usage(place).free)} free)"


CHECKS: Mapping[str, Callable[[Path | None], str]] = {
    "python": _python,
    "machine": _machine,
    "host target": _host,
    "compiler": _compiler,
    "linker": _linker,
    "presets": _crosses,
    "store": _store,
}
