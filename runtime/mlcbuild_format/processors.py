"""Lists processors and their instruction-set extensions, named as in LLVM, for builder and runtime.

The tables contain the *checkable* extensions: those that code compiled by mlcbuild can use. An instruction
that the processor lacks ends the process with a signal, so builder and runtime compare a target's extensions
with the machine's before they load a library.
"""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

System = Literal["linux", "macos", "windows", "none"]

X86_LEVELS: Mapping[str, tuple[str, ...]] = {
    "x86-64-v2": ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"),
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}
"""Level of the x86-64 psABI -> LLVM's names of the features it adds to the level before it (System V ABI,
table "micro-architecture levels"). Baseline x86-64 is not listed: it adds nothing."""

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
"""LLVM's name of an x86-64 extension that the runtime checks -> its flag in Linux's /proc/cpuinfo."""

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
"""LLVM's name of a 64-bit Arm extension that the runtime checks -> (its flag in Linux's /proc/cpuinfo, its
name in macOS's sysctl below hw.optional.arm, "" if it has none)."""

_HWCAP, _HWCAP2 = 16, 26
_ARM_BITS: Mapping[str, tuple[int, int]] = {
    "bf16": (_HWCAP2, 14),
    "dotprod": (_HWCAP, 20),
    "fp16fml": (_HWCAP, 23),
    "fullfp16": (_HWCAP, 10),
    "i8mm": (_HWCAP2, 13),
    "lse": (_HWCAP, 8),
    "rdm": (_HWCAP, 12),
    "sve": (_HWCAP, 22),
    "sve2": (_HWCAP2, 1),
}
"""LLVM's name of a 64-bit Arm extension that the runtime checks -> (number of the entry of Linux's auxiliary
vector, index of the bit in it, counted from the lowest, 0)."""

CHECKABLE: Mapping[str, frozenset[str]] = {
    "x86_64": frozenset(X86_FEATURES),
    "aarch64": frozenset(ARM_FEATURES),
}
"""Architecture, such as x86_64 -> LLVM's names of the instruction-set extensions that the runtime checks."""


@dataclass(frozen=True)
class Names:
    """LLVM's names of the processors of one architecture, with their extensions, and of its features."""

    cpus: Mapping[str, frozenset[str]]
    """Name of a processor or of a psABI level, such as x86-64-v3 -> LLVM's names of its instruction-set
    extensions, those of the levels below included, as far as the runtime checks them."""
    features: frozenset[str]


@lru_cache(maxsize=1)
def names() -> Mapping[str, Names]:
    """Returns architecture, x86_64 or aarch64 -> the names by which LLVM calls its processors and features.
    The names are read from cpus.json, which tests/llvm_table.py writes."""
    text = Path(__file__).with_name("cpus.json").read_text(encoding="utf-8")
    levels: dict[str, frozenset[str]] = {}
    for level, added in X86_LEVELS.items():
        levels[level] = frozenset(added).union(*levels.values())
    return {
        architecture: Names(
            {
                cpu: frozenset[str]().union(*(levels.get(word, {word}) for word in words.split()))
                for cpu, words in table["cpus"].items()
            },
            frozenset(table["features"]),
        )
        for architecture, table in json.loads(text)["architectures"].items()
    }


def family(architecture: str) -> str:
    """Returns the canonical name of an architecture, in lower case: arm64 -> aarch64, amd64 -> x86_64."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(architecture.lower(), architecture.lower())


def system(triple: str) -> System:
    """Returns the operating system of an LLVM target triple: "linux", "macos" or "windows"; "none" for any
    other system and for bare metal."""
    if "linux" in triple:
        return "linux"
    if "darwin" in triple or "macos" in triple:
        return "macos"
    return "windows" if "windows" in triple else "none"


def needed(architecture: str, cpu: str, features: Collection[str]) -> frozenset[str]:
    """Returns LLVM's names of the instruction-set extensions that code compiled for a target may use, among
    those that the runtime checks.

    cpu, features: as for LLVM, each feature with its sign (+avx2, -sse3); one with - is left out even where
    another adds it, and implied features are not added. For a `cpu` that is not in LLVM's table, only the
    features with a + count. The result is empty for an architecture without a table.
    """
    table = names().get(family(architecture))
    if table is None:
        return frozenset()
    added = {feature[1:] for feature in features if feature.startswith("+")}
    removed = {feature[1:] for feature in features if feature.startswith("-")}
    features_of_cpu = table.cpus.get(cpu, frozenset())
    return ((features_of_cpu | added) - removed) & CHECKABLE[family(architecture)]


def x86_features(cpuinfo: str) -> frozenset[str]:
    """Returns LLVM's names of the instruction-set extensions that all processors of an x86-64 machine have,
    among those that the runtime checks. cpuinfo: the text of Linux's /proc/cpuinfo."""
    flags = _flags(cpuinfo, "flags")
    return frozenset(name for name, flag in X86_FEATURES.items() if flag in flags)


def arm_features(cpuinfo: str) -> frozenset[str]:
    """Returns LLVM's names of the instruction-set extensions that all processors of a 64-bit Arm machine
    have, among those that the runtime checks. cpuinfo: the text of Linux's /proc/cpuinfo."""
    flags = _flags(cpuinfo, "Features")
    return frozenset(name for name, (flag, _) in ARM_FEATURES.items() if flag in flags)


def auxiliary_features(value: Callable[[int], int]) -> frozenset[str]:
    """Returns LLVM's names of the instruction-set extensions of a 64-bit Arm machine, among those that the
    runtime checks. value: function like getauxval, from the number of an entry of Linux's auxiliary vector to
    its bits. Source: arch/arm64/include/uapi/asm/hwcap.h."""
    return frozenset(name for name, (entry, bit) in _ARM_BITS.items() if value(entry) >> bit & 1)


def _auxiliary_value(entry: int) -> int:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(entry))


def apple_features(sysctl: Callable[[str], str]) -> frozenset[str]:
    """Returns LLVM's names of the instruction-set extensions that an Apple machine's processor has, among
    those of ARM_FEATURES. sysctl: function from a name such as hw.optional.arm.FEAT_BF16 to its value, "1"
    for an extension that is there, "" if there is no such name."""
    named = {name: apple for name, (_, apple) in ARM_FEATURES.items() if apple}
    return frozenset(name for name, apple in named.items() if sysctl(f"hw.optional.arm.{apple}") == "1")


def present() -> frozenset[str] | None:
    """Returns LLVM's names of the instruction-set extensions that this machine's processor has, among those
    that CHECKABLE lists for its architecture; None where the system does not report them, and for an
    architecture without a list."""
    kind = sys.platform, family(platform.machine())
    try:
        if kind == ("darwin", "aarch64"):
            return apple_features(sysctl)
        if kind[0] == "darwin":
            return _intel_mac_features(sysctl)
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    if kind[1] == "x86_64":
        return x86_features(text)
    if kind[1] != "aarch64":
        return None
    # Emulators of a processor may show the file of the machine that they run on.
    return arm_features(text) if "Features" in text else auxiliary_features(_auxiliary_value)


def sysctl(name: str) -> str:
    """Returns the value of a macOS sysctl name, or "" if there is no such name. Raises OSError if sysctl
    cannot run, subprocess.TimeoutExpired after 10 seconds."""
    process = subprocess.run(
        ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=False
    )
    return process.stdout.strip() if process.returncode == 0 else ""


def _intel_mac_features(sysctl: Callable[[str], str]) -> frozenset[str] | None:
    keys = ("features", "leaf7_features", "extfeatures")
    flags = " ".join(sysctl(f"machdep.cpu.{key}") for key in keys).lower().split()
    spelled = {"avx1.0": "avx", "bmi1": "bmi", "lahf": "sahf"}
    return frozenset(spelled.get(flag, flag) for flag in flags) & CHECKABLE["x86_64"] if flags else None


def _flags(cpuinfo: str, label: str) -> frozenset[str]:
    """Returns the CPU flags in a text of /proc/cpuinfo that all processors of the machine have, since a
    thread may move to any of them. label: name of the lines that list the flags; without such a line there
    are none."""
    common: frozenset[str] | None = None
    for line in set(cpuinfo.splitlines()):
        name, _, value = line.partition(":")
        if name.strip() == label:
            flags = frozenset(value.split())
            common = flags if common is None else common & flags
    return common or frozenset()
