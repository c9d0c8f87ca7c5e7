"""Processor flags of real machines, and targets for them, for tests."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


LINUX = "x86_64-unknown-linux-gnu"


ARM = "aarch64-unknown-linux-gnu"


# The flags of real machines, shortened to those that are looked at and a few others.
V2 = "sse3_is_pni pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"


V3 = f"{V2} fma movbe xsave avx f16c abm bmi1 avx2 bmi2"


V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"


X86 = {
    "core2": ("pni cx16 ssse3 lahf_lm", "x86-64", ("+cx16", "+sahf", "+sse3", "+ssse3")),
    "nehalem": (V2, "x86-64-v2", ()),
    "sandybridge": (f"{V2} avx xsave", "x86-64-v2", ("+avx", "+xsave")),
    "haswell": (V3, "x86-64-v3", ()),
    "haswell without lzcnt in a virtual machine": (
        V3.replace(" abm", ""),
        "x86-64-v2",
        ("+avx", "+avx2", "+bmi", "+bmi2", "+f16c", "+fma", "+movbe", "+xsave"),
    ),
    "knl": (f"{V3} avx512f avx512cd avx512_vnni", "x86-64-v3", ()),
    "alderlake": (f"{V3} avx_vnni gfni vpclmulqdq", "x86-64-v3", ("+avxvnni", "+gfni", "+vpclmulqdq")),
    "skylake-avx512": (V4, "x86-64-v4", ()),
    "cascadelake": (f"{V4} avx512_vnni", "x86-64-v4", ("+avx512vnni",)),
    "cooperlake": (f"{V4} avx512_vnni avx512_bf16", "x86-64-v4", ("+avx512bf16", "+avx512vnni")),
    "sierraforest": (
        f"{V3} avx_vnni avx_vnni_int8 gfni vpclmulqdq",
        "x86-64-v3",
        ("+avxvnni", "+avxvnniint8", "+gfni", "+vpclmulqdq"),
    ),
}


ARMS = {
    "Raspberry Pi 4": ("fp asimd evtstrm crc32 cpuid", ()),
    "Raspberry Pi 5": (
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
        ("+dotprod", "+fullfp16", "+lse", "+rdm"),
    ),
    "Graviton 3": (
        "fp asimd atomics fphp asimdhp asimdrdm asimddp sve asimdfhm svei8mm i8mm bf16",
        ("+bf16", "+dotprod", "+fp16fml", "+fullfp16", "+i8mm", "+lse", "+rdm", "+sve"),
    ),
}


def cpuinfo(flags: str, label: str = "flags") -> str:
    return f"processor\t: 0\n{label}\t\t: {flags}\nbogomips\t: 5000\n\nprocessor\t: 1\n{label}\t\t: {flags}\n"
