"""Determines the LLVM triple, processor name and features of this machine, without using LLVM. Raises
SetupError for a machine that is neither Linux on x86-64 or 64-bit Arm nor macOS on arm64."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from mlcbuild_format import processors

from mlcbuild.errors import SetupError

_CPUINFO = Path("/proc/cpuinfo")
_REMEDY = "describe this machine in the recipe instead, with triple, cpu and features"


@lru_cache(maxsize=1)
def host() -> tuple[str, str, tuple[str, ...]]:
    """Returns (LLVM triple, processor, features) of this machine: the features with sign, such as "+aes",
    sorted, as far as they can be checked. Raises SetupError on any other system than Linux on x86-64 or
    64-bit Arm and macOS on arm64, and if the system's description of the processor cannot be read."""
    kind = platform.system(), platform.machine().lower()
    if kind[0] == "Linux" and kind[1] in ("x86_64", "amd64"):
        return "x86_64-unknown-linux-gnu", *x86_cpu(_cpuinfo())
    if kind[0] == "Linux" and kind[1] in ("aarch64", "arm64"):
        return "aarch64-unknown-linux-gnu", "generic", arm_features(_cpuinfo())
    if kind == ("Darwin", "arm64"):
        return "arm64-apple-macosx11.0.0", "apple-m1", apple_features(_sysctl)
    raise SetupError(
        f"the target 'host' is not known on {kind[0]} {kind[1]}: it works on Linux (x86-64, aarch64) and "
        f"macOS (arm64); {_REMEDY}"
    )


def _cpuinfo() -> str:
    """Returns the text of Linux's /proc/cpuinfo. Raises SetupError if it cannot be read."""
    try:
        return _CPUINFO.read_text(errors="replace")
    except OSError as error:
        raise SetupError(
            f"the target 'host' needs {_CPUINFO}, which cannot be read ({error.strerror}); {_REMEDY}"
        ) from None


def _sysctl(name: str) -> str:
    """Returns the value of a macOS sysctl name, or "" if there is no such name. Raises SetupError if sysctl
    cannot run, or does not answer in time."""
    try:
        return processors.sysctl(name)
    except OSError as error:
        reason = error.strerror
    except subprocess.TimeoutExpired as error:
        reason = f"no answer after {error.timeout:g} s"
    raise SetupError(f"the target 'host' needs sysctl's {name}, which cannot be read ({reason}); {_REMEDY}")


def x86_cpu(cpuinfo: str) -> tuple[str, tuple[str, ...]]:
    """Parses the text of Linux's /proc/cpuinfo for an x86-64 machine, and returns (psABI level, such as
    x86-64-v3, or "x86-64" for the baseline; LLVM features beyond it that can be checked, such as "+aes",
    sorted). For a machine below x86-64-v4, no AVX-512 feature is returned."""
    present = processors.x86_features(cpuinfo)
    level, covered = "x86-64", set[str]()
    for name, added in processors.X86_LEVELS.items():
        if not present.issuperset(added):
            break
        level, covered = name, covered | set(added)
    if level != "x86-64-v4":
        # Every AVX-512 extension makes LLVM assume the AVX-512 foundation, of which this processor lacks a
        # part.
        present = frozenset(name for name in present if not name.startswith("avx512"))
    return level, _signed(present - covered)


def arm_features(cpuinfo: str) -> tuple[str, ...]:
    """Parses the text of Linux's /proc/cpuinfo, and returns the LLVM features of a 64-bit Arm machine that
    can be checked, such as "+dotprod", sorted.
    """
    return _signed(processors.arm_features(cpuinfo))


def apple_features(sysctl: Callable[[str], str]) -> tuple[str, ...]:
    """Returns the LLVM features of an Apple machine that can be checked, such as "+dotprod", sorted. sysctl:
    function from the name of a system value to its text, "" for a name that does not exist."""
    return _signed(processors.apple_features(sysctl))


def _signed(features: frozenset[str]) -> tuple[str, ...]:
    return tuple(f"+{name}" for name in sorted(features))
