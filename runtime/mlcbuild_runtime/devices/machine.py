"""This machine's processor against a bundle's target, and how many threads to use.

The names are LLVM's. A library that uses an instruction which the processor lacks ends the process by a
signal, so `refusal` is asked before anything of the library is loaded. Sources: LLVM's X86.td and
AArch64Processors.td; the x86-64 psABI for the levels; Linux's asm/hwcap.h and
Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from mlcbuild_format.bundle import Machine

_LOOKS, _BETWEEN = 12, 0.001
_V2 = "cx16 popcnt sahf sse3 ssse3 sse4.1 sse4.2"
_V3 = f"{_V2} avx avx2 bmi bmi2 f16c fma lzcnt movbe xsave"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_ICE = f"{_V4} avx512vnni avx512ifma avx512vbmi avx512vbmi2 avx512bitalg avx512vpopcntdq gfni vpclmulqdq"
_SPR = f"{_ICE} avx512bf16 avx512fp16 avxvnni"
_A76 = "crc lse rdm fullfp16 dotprod"

CPUS: dict[str, frozenset[str]] = {
    name: frozenset(features.split())
    for names, features in {
        "x86-64 generic": "",
        "x86-64-v2 nehalem westmere silvermont": _V2,
        "sandybridge ivybridge btver2": f"{_V2} avx",
        "x86-64-v3 haswell broadwell skylake znver1 znver2 znver3": _V3,
        "alderlake raptorlake meteorlake": f"{_V3} avxvnni gfni vpclmulqdq",
        "x86-64-v4 skylake-avx512": _V4,
        "cascadelake": f"{_V4} avx512vnni",
        "cooperlake": f"{_V4} avx512vnni avx512bf16",
        "icelake-client icelake-server rocketlake tigerlake": _ICE,
        "znver4": f"{_ICE} avx512bf16",
        "znver5": f"{_ICE} avx512bf16 avxvnni",
        "sapphirerapids emeraldrapids graniterapids": f"{_SPR} amx-int8 amx-bf16 amx-tile",
        "cortex-a53 cortex-a57 cortex-a72 cortex-a73": "crc",
        "cortex-a55 cortex-a75 cortex-a76 cortex-a78 neoverse-n1 apple-m1": _A76,
        "neoverse-v1": f"{_A76} i8mm bf16 sve",
        "neoverse-n2 neoverse-v2 cortex-x3": f"{_A76} i8mm bf16 sve sve2",
        "apple-m2 apple-m3 apple-m4": f"{_A76} i8mm bf16",
    }.items()
    for name in names.split()
}
"""What a processor or level is known to need. A name that is not here is judged by its features alone."""

_LINUX_X86 = {  # Linux's spelling in /proc/cpuinfo, where it is not LLVM's
    "pni": "sse3",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "abm": "lzcnt",
    "bmi1": "bmi",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "avx_vnni": "avxvnni",
    "avx_vnni_int8": "avxvnniint8",
    "lahf_lm": "sahf",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "amx_tile": "amx-tile",
}
_HWCAP = {0: "fp-armv8", 1: "neon", 3: "aes", 6: "sha2", 7: "crc", 8: "lse", 10: "fullfp16", 12: "rdm"}
_HWCAP |= {15: "rcpc", 20: "dotprod", 22: "sve", 23: "fp16fml"}
_HWCAP2 = {1: "sve2", 13: "i8mm", 14: "bf16"}
_APPLE = {
    "FEAT_CRC32": "crc",
    "FEAT_LSE": "lse",
    "FEAT_RDM": "rdm",
    "FEAT_FP16": "fullfp16",
    "FEAT_FHM": "fp16fml",
    "FEAT_DotProd": "dotprod",
    "FEAT_I8MM": "i8mm",
    "FEAT_BF16": "bf16",
    "FEAT_AES": "aes",
    "FEAT_SHA256": "sha2",
    "FEAT_LRCPC": "rcpc",
}
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: the system call, ARCH_REQ_XCOMP_PERM, and the state component of tile registers."""
_CHECKED = frozenset().union(*CPUS.values(), _LINUX_X86.values(), _HWCAP.values(), _HWCAP2.values())
"""Features whose absence this module can see; others (tuning flags, for example) are not judged."""


def architecture(name: str) -> str:
    """One spelling for each architecture: x86_64, aarch64, ..."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name.lower(), name.lower())


def refusal(target: Machine) -> str | None:
    """Why this machine cannot run a bundle for `target`, as one sentence; None when it can."""
    if target.device != "cpu":
        return f"the bundle is for the device '{target.device}', but this runtime runs CPUs only"
    if target.output != "shared":
        return (
            f"the bundle holds an '{target.output}' to be linked elsewhere, not a library that can be loaded"
        )
    here = f"{architecture(platform.machine())} on {_system()}"
    there = f"{architecture(target.architecture)} on {_system_of(target.triple)}"
    if here != there:
        return f"the bundle is for {there} ({target.triple}), but this machine is {here}"
    present = features()
    missing = missing_features(target, present) if present is not None else []
    if missing:
        return (
            f"the bundle is for the processor '{target.cpu}', and this machine's processor lacks"
            f" {', '.join(missing)}: build a bundle for a target that it has"
        )
    return None


def missing_features(target: Machine, present: frozenset[str]) -> list[str]:
    """The features that `target` needs and `present` lacks, sorted."""
    return sorted(_needed(target) - present)


def prepare(target: Machine) -> str | None:
    """Get from the system what a bundle for `target` uses; otherwise why it cannot run, as one sentence.

    Called before any of the bundle's code runs, on a machine that has the processor for it.
    """
    if "amx-tile" not in _needed(target) or allow_tiles():
        return None
    return (
        "the bundle uses the tile registers of AMX, and this system does not let processes have them: Linux"
        " does from 5.16 on, unless it runs in a virtual machine or a sandbox that forbids it; build a bundle"
        " for a target without amx-tile"
    )


def allow_tiles() -> bool:
    """Whether this process, all its threads, may use AMX tile registers; Linux wants to be asked once."""
    if sys.platform != "linux" or architecture(platform.machine()) != "x86_64":
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)
    except (OSError, AttributeError):
        return False


def _needed(target: Machine) -> set[str]:
    needed = set(CPUS.get(target.cpu, frozenset()))
    for feature in target.features:
        name = feature.lstrip("+-")
        if feature.startswith("-"):
            needed.discard(name)
        elif name in _CHECKED:
            needed.add(name)
    return needed


def features() -> frozenset[str] | None:
    """This processor's features by LLVM's names; None when the system does not tell."""
    try:
        if _system() == "macos":
            return _macos_features()
        if architecture(platform.machine()) == "aarch64":
            return _aarch64_features()
        return _x86_features()
    except (OSError, AttributeError):
        return None


def _x86_features() -> frozenset[str] | None:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(_LINUX_X86.get(flag, flag) for flag in value.split())
    return None


def _aarch64_features() -> frozenset[str]:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    found = {name for bit, name in _HWCAP.items() if getauxval(16) >> bit & 1}
    return frozenset(found | {name for bit, name in _HWCAP2.items() if getauxval(26) >> bit & 1})


def _macos_features() -> frozenset[str] | None:
    command = ["sysctl", "hw.optional.arm" if platform.machine() == "arm64" else "machdep.cpu"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    if platform.machine() == "arm64":
        on = {line.split(":")[0].rpartition(".")[2] for line in lines if line.endswith(": 1")}
        # Every Apple processor has these; older systems do not list them.
        return frozenset(name for key, name in _APPLE.items() if key in on) | {"neon", "fp-armv8", "crc"}
    flags = " ".join(line.partition(":")[2] for line in lines if "features" in line).lower().split()
    apple = {"avx1.0": "avx", "bmi1": "bmi", "lahf": "sahf"}
    return frozenset(apple.get(flag, flag) for flag in flags) or None


def _system() -> str:
    return "macos" if sys.platform == "darwin" else sys.platform


def _system_of(triple: str) -> str:
    for word, system in (("linux", "linux"), ("darwin", "macos"), ("macos", "macos"), ("windows", "win32")):
        if word in triple:
            return system
    return "a machine without a system"


def default_threads() -> int:
    """Physical cores that this process may use, within the quota of its control group; at least 1."""
    if sys.platform == "linux":
        allowed = os.sched_getaffinity(0)
        cores = {_siblings(cpu) for cpu in allowed}
        count = len(cores)
    else:
        count = os.cpu_count() or 1
    return max(1, min(count, _quota() or count))


def free_cores(enough: int, root: Path = Path("/")) -> int | None:
    """Logical processors of the machine on which nobody else computes; None where the system does not say.
    The best of some looks counts, up to `enough`: who has sent a request runs for a moment. Where there are
    too few, that takes twelve milliseconds."""
    fewest, cores = None, os.cpu_count() or 1
    for look in range(_LOOKS):
        time.sleep(_BETWEEN if look else 0)
        try:
            running = int((root / "proc" / "loadavg").read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return None
        fewest = running if fewest is None else min(fewest, running)
        if cores - max(0, fewest - 1) >= enough:  # this thread runs, too
            break
    return cores - max(0, (fewest or 1) - 1)


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quota(root: Path = Path("/")) -> int | None:
    """Whole processors that control groups grant to this process, rounded up; None when there is no limit.

    Limits of the process's own group and of those around it hold, under version 2 (cpu.max) and version 1.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    grants = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")
        group = base / path.lstrip("/")
        # In a container the path may be the host's, and only `base` be there.
        grants += [_grant(place) for place in (group, *group.parents) if place.is_relative_to(base)]
    return min((grant for grant in grants if grant is not None), default=None)


def _grant(group: Path) -> int | None:
    """Of one control group."""
    try:
        if (group / "cpu.max").is_file():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if limit == "max" or int(limit) < 0 else -(-int(limit) // int(period))
    except (OSError, ValueError):
        return None
