"""Tests of the reasons why a machine cannot run a target."""

from __future__ import annotations

import pytest

from mlcbuild.targets import host as this_machine
from mlcbuild.targets import presets, requirements
from mlcbuild.targets.target import Target
from tests.targets.machines import ARM, LINUX, V3, V4, X86, cpuinfo


@pytest.mark.parametrize(
    ("target", "host", "reason"),
    [
        ("x86-64-v3", ("x86_64", V3), None),
        ("x86-64-v2", ("x86_64", V4), None),
        ("x86-64-v4", ("x86_64", V3), "avx512bw, avx512cd, avx512dq, avx512f, avx512vl"),
        ("x86-64-v4-vnni", ("x86_64", V4), "avx512vnni"),
        ("x86-64-v4-vnni", ("x86_64", f"{V4} avx512_vnni"), None),
        ("x86-64-v4-amx", ("x86_64", f"{V4} avx512_vnni avx512vbmi avx512_fp16"), "amx-bf16, amx-tile"),
        ("x86-64-v3", ("x86_64", V3.replace(" fma", "")), "fma"),
        ("aarch64-linux", ("aarch64", "asimd"), "dotprod"),
        ("aarch64-linux", ("aarch64", "asimd asimddp i8mm"), None),
    ],
)
def test_what_a_machine_can_run(target: str, host: tuple[str, str], reason: str | None) -> None:
    architecture, flags = host
    if architecture == "x86_64":
        machine = Target("host", LINUX, *this_machine.x86_cpu(cpuinfo(flags)))
    else:
        machine = Target("host", ARM, "generic", this_machine.arm_features(cpuinfo(flags, "Features")))
    expected = reason and f"this needs {reason}, which this CPU lacks"
    assert requirements.why_not(presets.resolve(target), machine) == expected
    missing = tuple(reason.split(", ")) if reason else ()
    assert requirements.missing_features(presets.resolve(target), machine) == missing


def test_named_processors_are_compared_by_what_they_have() -> None:
    cascadelake = Target("host", LINUX, *this_machine.x86_cpu(cpuinfo(X86["cascadelake"][0])))
    haswell = Target("host", LINUX, *this_machine.x86_cpu(cpuinfo(X86["haswell"][0])))
    assert requirements.why_not(Target("", LINUX, "cascadelake"), cascadelake) is None
    assert requirements.missing_features(Target("", LINUX, "skylake-avx512"), haswell) == (
        "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl",
    )  # fmt: skip
    assert requirements.missing_features(Target("", LINUX, "icelake-server", ("-gfni",)), cascadelake) == (
        "avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vpopcntdq", "vpclmulqdq",
    )  # fmt: skip
    # Tuning is not compared.
    assert requirements.missing_features(Target("", LINUX, "haswell", ("+prefer-256-bit",)), haswell) == ()


def test_other_systems_architectures_and_objects_do_not_run() -> None:
    linux, mac = presets.resolve("aarch64-linux"), presets.resolve("macos-arm64")
    assert requirements.why_not(mac, linux) == "this is for macos aarch64, and this machine is linux aarch64"
    assert requirements.why_not(presets.resolve("x86-64-v2"), linux) == (
        "this is for linux x86_64, and this machine is linux aarch64"
    )
    assert requirements.why_not(Target("", ARM, "generic", output="object"), linux) == (
        "an object file must be linked into a program before it can run"
    )
    assert requirements.why_not(mac, mac) is None
    assert requirements.missing_features(Target("", "pdp11-dec-none", "pdp11"), linux) == ()
