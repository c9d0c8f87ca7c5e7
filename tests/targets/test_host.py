"""Tests of describing this machine from what operating systems report about its processors."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
from mlcbuild_format import processors

from mlcbuild.documents.document import parse
from mlcbuild.errors import Problems, SetupError
from mlcbuild.targets import host as this_machine
from mlcbuild.targets import presets, requirements
from mlcbuild.targets.target import Target
from tests.targets.machines import ARMS, V3, X86, cpuinfo


def inline(text: str) -> tuple[Target | None, list[str]]:
    """Reads a target that is written in a recipe. Returns (the target, or None if it is wrong; the messages
    of the problems that the JSON schema does not detect). text: the target as YAML."""
    problems = Problems()
    target = presets.parse(parse(text.encode(), "r.yaml"), (), "mine", problems)
    return target, [str(problem).removeprefix("r.yaml:") for problem in sorted(problems)]


@pytest.mark.parametrize("machine", X86)
def test_x86_levels_from_cpuinfo(machine: str) -> None:
    flags, cpu, features = X86[machine]
    assert this_machine.x86_cpu(cpuinfo(flags)) == (cpu, features)


@pytest.mark.parametrize("machine", ARMS)
def test_arm_features_from_cpuinfo(machine: str) -> None:
    flags, features = ARMS[machine]
    assert this_machine.arm_features(cpuinfo(flags, "Features")) == features


def test_a_feature_counts_only_when_every_processor_has_it() -> None:
    mixed = cpuinfo(f"{V3} avx_vnni") + "\n" + cpuinfo(V3)
    assert this_machine.x86_cpu(mixed) == ("x86-64-v3", ())
    assert this_machine.x86_cpu("") == ("x86-64", ())
    assert this_machine.arm_features("") == ()


def test_arm_features_from_the_auxiliary_vector() -> None:
    """Checks reading processor features from Linux's auxiliary vector, which is used where /proc/cpuinfo
    describes the machine that runs an emulator."""
    hwcap, hwcap2 = (1 << 20) | (1 << 8), 1 << 13
    values = {16: hwcap, 26: hwcap2}
    assert processors.auxiliary_features(values.__getitem__) == {"dotprod", "lse", "i8mm"}
    every = processors.auxiliary_features(lambda entry: -1)
    assert every == processors.CHECKABLE["aarch64"]


def test_apple_features_from_sysctl() -> None:
    m1 = {f"hw.optional.arm.FEAT_{name}": "1" for name in ("DotProd", "FP16", "FHM", "LSE", "RDM")}
    m2 = m1 | {"hw.optional.arm.FEAT_I8MM": "1", "hw.optional.arm.FEAT_BF16": "1"}
    own = ("+dotprod", "+fp16fml", "+fullfp16", "+lse", "+rdm")
    off = {"hw.optional.arm.FEAT_I8MM": "0"}
    assert this_machine.apple_features(lambda name: (m1 | off).get(name, "")) == own
    assert this_machine.apple_features(lambda name: m2.get(name, "")) == tuple(
        sorted((*own, "+bf16", "+i8mm"))
    )


def test_unknown_machines_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    this_machine.host.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with pytest.raises(SetupError) as caught:
        presets.resolve("host")
    assert str(caught.value) == (
        "the target 'host' is not known on Linux s390x: it works on Linux (x86-64, aarch64) and macOS "
        "(arm64); describe this machine in the recipe instead, with triple, cpu and features"
    )
    assert inline("{extends: host}")[1] == [f"1:11: {caught.value}"]
    monkeypatch.undo()
    this_machine.host.cache_clear()


@pytest.mark.parametrize(
    ("system", "machine", "error", "reason"),
    [
        ("Linux", "x86_64", PermissionError(13, "denied"), "/proc/cpuinfo, which cannot be read (denied)"),
        ("Linux", "aarch64", OSError(5, "broken"), "/proc/cpuinfo, which cannot be read (broken)"),
        (
            "Darwin",
            "arm64",
            OSError(2, "absent"),
            "sysctl's hw.optional.arm.FEAT_BF16, which cannot be read (absent)",
        ),
        (
            "Darwin",
            "arm64",
            subprocess.TimeoutExpired("sysctl", 10),
            "sysctl's hw.optional.arm.FEAT_BF16, which cannot be read (no answer after 10 s)",
        ),
    ],
)
def test_a_machine_that_does_not_describe_itself(
    system: str, machine: str, error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the messages if the system's description of the processor cannot be read, for the target `host`
    and for one that extends it."""

    def fail(*_: object, **__: object) -> str:
        raise error

    this_machine.host.cache_clear()
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", fail)
    monkeypatch.setattr(processors, "sysctl", fail)
    with pytest.raises(SetupError) as caught:
        presets.resolve("host")
    assert str(caught.value) == (
        f"the target 'host' needs {reason}; describe this machine in the recipe instead, with triple, cpu "
        "and features"
    )
    assert inline("{extends: host}")[1] == [f"1:11: {caught.value}"]


def test_this_machine_runs_what_is_made_for_it() -> None:
    host = presets.resolve("host")
    assert host.name == "host"
    assert host.cpu not in ("native", "host", "")
    assert requirements.why_not(host, host) is None
    assert requirements.missing_features(host, host) == ()
