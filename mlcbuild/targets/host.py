"""This machine in LLVM's words, found without LLVM.

Only instruction-set extensions that code made by mlcbuild can contain are looked at. They are the
*checkable* features: host() reports them, and targets.missing_features() compares them.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from mlcbuild.errors import SetupError

X86_LEVELS: Mapping[str, tuple[str, ...]] = {
    "x86-64-v2": ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"),
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}
"""What each level of the x86-64 psABI adds to the one before it (System V ABI, table "micro-architecture
levels"), in LLVM's spelling; x86-64 itself comes first and adds nothing."""

X86_FEATURES: Mapping[str, str] = {
    **{name: name for names in X86_LEVELS.values() for name in names},
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
    "amx-tile": "amx_tile",
    "avx512bf16": "avx512_bf16",
    "avx512bitalg": "avx512_bitalg",
    "avx512fp16": "avx512_fp16",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxvnni": "avx_vnni",
    "avxvnniint8": "avx_vnni_int8",
    "bmi": "bmi1",
    "gfni": "gfni",
    "lzcnt": "abm",
    "sahf": "lahf_lm",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "vpclmulqdq": "vpclmulqdq",
}
"""LLVM's name of a checkable feature -> its flag in Linux's /proc/cpuinfo."""

ARM_FEATURES: Mapping[str, tuple[str, str]] = {
    "bf16": ("bf16", "FEAT_BF16"),
    "dotprod": ("asimddp", "FEAT_DotProd"),
    "fp16fml": ("asimdfhm", "FEAT_FHM"),
    "fullfp16": ("asimdhp", "FEAT_FP16"),
    "i8mm": ("i8mm", "FEAT_I8MM"),
    "lse": ("atomics", "FEAT_LSE"),
    "rdm": ("asimdrdm", "FEAT_RDM"),
    "sve": ("sve", ""),
    "sve2": ("sve2", ""),
}
"""LLVM's name of a checkable feature -> its flag in Linux's /proc/cpuinfo, its name in macOS's sysctl."""

CHECKABLE: Mapping[str, frozenset[str]] = {
    "x86_64": frozenset(X86_FEATURES),
    "aarch64": frozenset(ARM_FEATURES),
}


@lru_cache(maxsize=1)
def host() -> tuple[str, str, tuple[str, ...]]:
    """(triple, cpu, features) of this machine. Raises SetupError where mlcbuild cannot tell."""
    kind = platform.system(), platform.machine().lower()
    if kind[0] == "Linux" and kind[1] in ("x86_64", "amd64"):
        return "x86_64-unknown-linux-gnu", *x86_cpu(Path("/proc/cpuinfo").read_text(errors="replace"))
    if kind[0] == "Linux" and kind[1] in ("aarch64", "arm64"):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        return "aarch64-unknown-linux-gnu", "generic", arm_features(text)
    if kind == ("Darwin", "arm64"):
        return "arm64-apple-macosx11.0.0", "apple-m1", apple_features(_sysctl)
    raise SetupError(
        f"the target 'host' is not known on {kind[0]} {kind[1]}: it works on Linux (x86-64, aarch64) and "
        "macOS (arm64); describe this machine in the recipe instead, with triple, cpu and features"
    )


def x86_cpu(cpuinfo: str) -> tuple[str, tuple[str, ...]]:
    """The psABI level and the checkable features beyond it, from the text of /proc/cpuinfo."""
    flags = _flags(cpuinfo, "flags")
    present = {name for name, flag in X86_FEATURES.items() if flag in flags}
    level, covered = "x86-64", set[str]()
    for name, added in X86_LEVELS.items():
        if not present.issuperset(added):
            break
        level, covered = name, covered | set(added)
    if level != "x86-64-v4":
        # Every AVX-512 extension makes LLVM assume the foundation, which is not whole here.
        present = {name for name in present if not name.startswith("avx512")}
    return level, tuple(f"+{name}" for name in sorted(present - covered))


def arm_features(cpuinfo: str) -> tuple[str, ...]:
    """The checkable features of a 64-bit Arm machine, from the text of Linux's /proc/cpuinfo."""
    flags = _flags(cpuinfo, "Features")
    return tuple(f"+{name}" for name, (flag, _) in sorted(ARM_FEATURES.items()) if flag in flags)


def apple_features(sysctl: Callable[[str], str]) -> tuple[str, ...]:
    """The checkable features of an Apple machine; `sysctl` gives the value of a name, or nothing."""
    named = sorted((name, apple) for name, (_, apple) in ARM_FEATURES.items() if apple)
    return tuple(f"+{name}" for name, apple in named if sysctl(f"hw.optional.arm.{apple}") == "1")


def _flags(cpuinfo: str, label: str) -> frozenset[str]:
    """The flags that every processor has: a thread may run on any of them."""
    found: frozenset[str] | None = None
    for line in set(cpuinfo.splitlines()):
        name, _, value = line.partition(":")
        if name.strip() == label:
            flags = frozenset(value.split())
            found = flags if found is None else found & flags
    return found or frozenset()


def _sysctl(name: str) -> str:
    done = subprocess.run(
        ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
