"""Tests of comparing this machine with a bundle's target: other systems, architectures and processors are
refused in one sentence."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mlcbuild_format import processors
from mlcbuild_format.bundle import Machine
from mlcbuild_format.fields import Json
from mlcbuild_runtime.devices import machine

from . import shared, toy

HERE = Machine(str(toy.TARGET["triple"]), str(toy.TARGET["cpu"]), (), "cpu", "shared")
LAPTOP = frozenset(
    [
        "cx16",
        "popcnt",
        "sahf",
        "sse3",
        "ssse3",
        "sse4.1",
        "sse4.2",
        "avx",
        "avx2",
        "bmi",
        "bmi2",
        "f16c",
        "fma",
        "lzcnt",
        "movbe",
        "xsave",
    ]
)


MISSING = min(processors.CHECKABLE[processors.family(platform.machine())] - (processors.present() or set()))
"""Name of a processor feature that this machine lacks."""


def test_this_machine_runs_what_is_made_for_it() -> None:
    assert machine.refusal(HERE) is None


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            replace(HERE, device="cuda"),
            "the bundle is for the device 'cuda', but this runtime runs CPUs only",
        ),
        (replace(HERE, output="object"), "the bundle holds an 'object' to be linked elsewhere"),
        (replace(HERE, triple="riscv64-unknown-linux-gnu"), "the bundle is for riscv64 on linux"),
        (replace(HERE, triple=f"{platform.machine()}-pc-windows-msvc"), "on windows "),
        (replace(HERE, triple="thumbv7em-none-eabi"), "on a machine without a system"),
    ],
)
def test_refusals(target: Machine, reason: str) -> None:
    message = machine.refusal(target)
    assert message is not None and reason in message and "\n" not in message


@pytest.mark.parametrize(
    ("cpu", "features", "missing"),
    [
        ("x86-64", (), []),
        ("x86-64-v3", (), []),
        ("haswell", (), []),
        ("x86-64-v3", ("+avxvnni",), ["avxvnni"]),
        ("x86-64-v4", (), ["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"]),
        ("x86-64-v4", ("-avx512cd", "-avx512dq"), ["avx512bw", "avx512f", "avx512vl"]),
        ("cascadelake", (), ["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512vnni"]),
        ("a-name-of-the-future", ("+avx2", "+prefer-256-bit"), []),
        ("a-name-of-the-future", ("+avx512f",), ["avx512f"]),
    ],
)
def test_missing_features(cpu: str, features: tuple[str, ...], missing: list[str]) -> None:
    target = Machine("x86_64-unknown-linux-gnu", cpu, features, "cpu", "shared")
    assert machine.missing_features(target, LAPTOP) == missing


TILES = replace(HERE, cpu="x86-64-v4", features=("+amx-bf16", "+amx-tile"))


def test_a_machine_without_tile_registers_is_named() -> None:
    assert {"amx-bf16", "amx-tile"} <= set(machine.missing_features(TILES, LAPTOP))


def test_nothing_is_asked_for_bundles_without_tile_registers() -> None:
    assert machine.prepare(HERE) is None
    assert machine.prepare(replace(TILES, features=())) is None


def test_a_system_that_refuses_tile_registers() -> None:
    """Checks the message if Linux refuses AMX tile registers. It does so for a process whose signal stack is
    too small for them, and on processors without them."""
    program = """
import ctypes
from mlcbuild_runtime.devices import machine
from mlcbuild_format.bundle import Machine

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(4096)
ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 4096)), None)
print(machine.prepare(Machine("x86_64-unknown-linux-gnu", "sapphirerapids", (), "cpu", "shared")))
"""
    output = shared.run("-c", program).stdout
    assert "this system does not let processes have them" in output and output.count("\n") == 1


@pytest.mark.skipif("amx-tile" not in (processors.present() or ()), reason="this processor has no AMX tiles")
def test_a_system_that_grants_tile_registers() -> None:
    if not machine.allow_tiles():
        pytest.skip("this system does not let processes use AMX tiles")
    assert machine.prepare(TILES) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"triple": "riscv64-unknown-linux-gnu"}, "the bundle is for riscv64 on linux"),
        ({"features": [f"+{MISSING}"]}, f"this machine's processor lacks {MISSING}"),
    ],
)
def test_a_bundle_for_another_machine_is_refused(
    toy_copy: Path, changes: dict[str, Json], reason: str
) -> None:
    document = json.loads((toy_copy / "bundle.json").read_bytes())
    document["target"].update(changes)
    (toy_copy / "bundle.json").write_text(json.dumps(document))
    result = shared.run("-m", "mlcbuild_runtime", str(toy_copy), "--port", "0")
    assert result.returncode == 1
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_cores_that_nobody_computes_on(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    loads, cores = tmp_path / "proc" / "loadavg", os.cpu_count() or 1
    free_cores = machine.FreeCores(tmp_path)
    assert free_cores(cores) is None
    for text, others in [("0.1 0.2 0.3 1/162 99\n", 0), ("0 0 0 4/9 1", 3), ("0 0 0 0/9 1", 0)]:
        loads.write_text(text)
        assert free_cores(cores) == cores - others
    for text in ("", "0 0 0", "0 0 0 many/9 1"):
        loads.write_text(text)
        assert free_cores(cores) is None
    assert machine.FreeCores()(1) is None or sys.platform == "linux"
    if Path("/proc/loadavg").exists():
        actual = machine.FreeCores()(1)
        assert actual is not None and actual <= cores


def test_a_free_machine_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "loadavg").write_text("0 0 0 2/9 1")
    cores, slept = os.cpu_count() or 1, list[float]()
    monkeypatch.setattr("time.sleep", slept.append)
    free_cores = machine.FreeCores(tmp_path)
    assert free_cores(cores - 1) == cores - 1 and not any(slept)
    assert free_cores(cores) == cores - 1 and sum(slept) > 0.01, "it may be over soon"


@pytest.mark.parametrize(
    ("load", "free"),
    [
        ((2, 0.0, 2.0, 0.0, 0), 8),  # a niced process with two threads
        ((20, 0.1, 8.0, 0.0, 0), 8),  # a niced build with more threads than processors
        ((9, 1.0, 7.0, 0.0, 0), 7),  # and one other process beside it
        ((9, 3.1, 5.0, 2.0, 0), 7),  # and this process, which computes, too
        ((3, 3.0, 0.0, 0.0, 0), 5),  # nobody is nice
        ((3, 0.1, 0.4, 0.0, 0), 5),  # three have just begun, and little was niced
        ((2, 0.0, 2.0, 0.0, 10), 6),  # this process is as nice as they are
        ((1, 5.0, 1.0, 0.0, 0), 7),  # five others were there, and one is left
    ],
)
def test_nice_processes_leave_their_cores(
    load: tuple[int, float, float, float, int], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks how many of 8 simulated processors count as free beside processes of low priority (niced ones).
    `others` is the number of other threads that run; `user`, `niced` and `own` are the average numbers of
    processors that normal processes, niced ones and this process use; `nice` is this process's niceness."""
    others, user, niced, own, nice = load
    proc, clock, ticks = tmp_path / "proc", [100.0], os.sysconf("SC_CLK_TCK")
    proc.mkdir()

    def stat(seconds: float) -> None:
        used = [round((1000 + rate * seconds) * ticks) for rate in (user, niced)]
        (proc / "stat").write_text(f"cpu  {used[0]} {used[1]} 77 88 0 0 0 0 0 0\ncpu0 1 2 3 4\n")

    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("os.getpriority", lambda kind, process: nice)
    (proc / "loadavg").write_text(f"0 0 0 {others + 1}/99 1")
    stat(0)
    free_cores = machine.FreeCores(tmp_path, lambda: clock[0], lambda: own * (clock[0] - 100))
    clock[0] += 0.05
    stat(0.05)
    assert free_cores(8) == 8 - others, "the time is too short to tell"
    clock[0] += 2.95
    stat(3)
    assert free_cores(8) == free
    (proc / "stat").write_text("cpu  much\n")
    assert free_cores(8) == 8 - others
