"""Tests of the table of processors that builder and runtime share."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from mlcbuild_format import processors


def test_one_spelling_of_architectures() -> None:
    assert [processors.family(name) for name in ("arm64", "AMD64", "x86_64", "riscv64")] == [
        *("aarch64", "x86_64", "x86_64", "riscv64")
    ]


@pytest.mark.parametrize(
    ("triple", "system"),
    [
        ("x86_64-unknown-linux-gnu", "linux"),
        ("arm64-apple-macosx11.0.0", "macos"),
        ("x86_64-pc-windows-msvc", "windows"),
        ("thumbv7em-none-eabi", "none"),
    ],
)
def test_systems(triple: str, system: str) -> None:
    assert processors.system(triple) == system


def test_a_level_holds_those_below_it() -> None:
    x86 = processors.names()["x86_64"].cpus
    assert x86["x86-64"] < x86["x86-64-v2"] < x86["x86-64-v3"] < x86["x86-64-v4"] < x86["cascadelake"]
    assert x86["cascadelake"] - x86["x86-64-v4"] == {"avx512vnni"}


def test_signs_add_and_remove() -> None:
    v3 = processors.names()["x86_64"].cpus["x86-64-v3"]
    actual = processors.needed("x86_64", "x86-64-v3", ("+avxvnni", "-fma", "+prefer-256-bit"))
    assert actual == v3 - {"fma"} | {"avxvnni"}, "tuning flags are not checked"
    assert processors.needed("arm64", "apple-m2", ()) == processors.needed("aarch64", "apple-m2", ())
    assert processors.needed("aarch64", "of-the-future", ("+sve2",)) == {"sve2"}
    assert processors.needed("riscv64", "sifive-u74", ("+v",)) == frozenset()


def test_features_that_only_some_cores_have_do_not_count() -> None:
    text = "processor: 0\nflags\t\t: pni avx2 fma\nprocessor: 1\nflags\t\t: pni avx2\n"
    assert processors.x86_features(text) == {"sse3", "avx2"}
    assert processors.arm_features("Features\t: asimd asimddp atomics\n") == {"dotprod", "lse"}
    on = {"hw.optional.arm.FEAT_DotProd": "1", "hw.optional.arm.FEAT_BF16": "0"}
    assert processors.apple_features(lambda name: on.get(name, "")) == {"dotprod"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems report features elsewhere")
def test_features_of_this_processor() -> None:
    actual, family = processors.present(), processors.family(platform.machine())
    assert actual is not None and actual <= processors.CHECKABLE[family]
    assert family != "x86_64" or "sse4.2" in actual


@pytest.mark.parametrize("architecture", ["arm64", "x86_64"])
def test_a_system_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    def sysctl(name: str) -> str:
        raise subprocess.TimeoutExpired(name, 10)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: architecture)
    monkeypatch.setattr(processors, "sysctl", sysctl)
    assert processors.present() is None
