"""Tests of the default number of threads on simulated machines: cores of two speeds, cores with two threads,
CPU quotas."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from mlcbuild_runtime.devices import thread_count

from . import shared


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def siblings(pairs: int, singles: int = 0) -> dict[str, str]:
    """Returns path -> content of the /sys files that describe `pairs` cores with two threads each (processors
    2i and 2i + 1), followed by `singles` cores with one thread."""
    name = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    paired = {name.format(cpu): f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}" for cpu in range(2 * pairs)}
    return paired | {name.format(cpu): str(cpu) for cpu in range(2 * pairs, 2 * pairs + singles)}


def test_threads_fit_what_is_allowed() -> None:
    assert 1 <= thread_count.default_threads() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("speeds", "count"),
    [
        ([1.0], 1),
        ([0.3], 1),
        ([1.0] * 64, 64),
        ([1.0] * 4 + [0.35] * 4, 4),  # four slow cores would make the fast ones wait
        ([0.35] * 4 + [1.0] * 4, 4),
        ([1.0] * 2 + [0.4] * 8, 10),  # eight slow cores outweigh two fast ones
        ([1.0] + [0.85] * 3 + [0.35] * 4, 4),
        ([1.0] * 2 + [0.9], 3),
    ],
)
def test_slow_cores_are_used_where_they_shorten_a_step(speeds: list[float], count: int) -> None:
    assert thread_count.best_count(speeds) == count


def test_the_best_count_is_the_soonest_of_all_counts() -> None:
    """Checks the number of threads against a simulation: each thread gets an equal part of the work, then
    small pieces of the rest whenever it is free."""

    def seconds(speeds: list[float]) -> float:
        pieces, share = 2000, thread_count.STATIC / len(speeds)
        free = [share / speed for speed in speeds]
        for _ in range(pieces):
            first = free.index(min(free))
            free[first] += (1 - thread_count.STATIC) / pieces / speeds[first]
        return max(free)

    for speeds in ([1.0] * 4 + [0.4] * 4, [1.0] * 2 + [0.4] * 8, [1.0, 0.8, 0.8, 0.3], [1.0] * 3 + [0.7] * 3):
        soonest = min(seconds(speeds[:count]) for count in range(1, len(speeds) + 1))
        assert seconds(speeds[: thread_count.best_count(speeds)]) <= soonest * 1.001, speeds


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    write(tmp_path, siblings(4))
    assert thread_count.core_speeds(range(8), tmp_path) == [1.0] * 4
    assert thread_count.core_speeds([0, 2, 3], tmp_path) == [1.0] * 2
    assert thread_count.core_speeds([5], tmp_path) == [1.0]


@pytest.mark.parametrize(
    ("performance", "efficiency", "count"), [(6, 4, 6), (8, 16, 24), (2, 8, 10), (8, 4, 8)]
)
def test_intel_states_which_cores_are_efficiency_cores(
    tmp_path: Path, performance: int, efficiency: int, count: int
) -> None:
    processors = 2 * performance + efficiency
    capacity = {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": "800" for cpu in range(processors)}
    atoms = {"sys/devices/cpu_atom/cpus": f"{2 * performance}-{processors - 1}"}
    write(tmp_path, siblings(performance, efficiency) | atoms | capacity)
    speeds = thread_count.core_speeds(range(processors), tmp_path)
    assert sorted(set(speeds)) == [thread_count._INTEL_EFFICIENCY, 1.0]
    assert (len(speeds), thread_count.best_count(speeds)) == (performance + efficiency, count)


def test_arm_states_each_core_s_capacity(tmp_path: Path) -> None:
    capacities = [350] * 4 + [870] * 3 + [1024]
    name = "sys/devices/system/cpu/cpu{}/cpu_capacity"
    write(tmp_path, {name.format(cpu): str(capacity) for cpu, capacity in enumerate(capacities)})
    speeds = thread_count.core_speeds(range(8), tmp_path)
    assert speeds == [capacity / 1024 for capacity in capacities]
    assert thread_count.best_count(speeds) == 4
    assert thread_count.best_count(thread_count.core_speeds(range(4), tmp_path)) == 4, "all alike again"


@pytest.mark.parametrize("text", ["", "all", "1-", "3-1-2", "0,x"])
def test_what_linux_does_not_tell_makes_all_cores_alike(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"sys/devices/cpu_atom/cpus": text, "sys/devices/system/cpu/cpu1/cpu_capacity": text})
    assert thread_count.core_speeds(range(3), tmp_path) == [1.0] * 3
    assert thread_count.core_speeds(range(3), tmp_path / "nothing") == [1.0] * 3


def nodes(cpulists: list[str], distances: list[str]) -> dict[str, str]:
    """Returns path -> content of the /sys files that describe NUMA nodes: the processors of each, and its
    distances to all nodes."""
    place = "sys/devices/system/node/"
    files = {f"{place}node{node}/cpulist": cpus for node, cpus in enumerate(cpulists)}
    files |= {f"{place}node{node}/distance": line for node, line in enumerate(distances)}
    return files | {f"{place}online": f"0-{len(cpulists) - 1}"}


TWO_SOCKETS = nodes(["0-3,8-11", "4-7,12-15"], ["10 21", "21 10"])
FOUR_PARTS = nodes(["0-1", "2-3", "4-5", "6-7"], ["10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10"])


@pytest.mark.parametrize(
    ("files", "allowed", "chosen"),
    [
        (TWO_SOCKETS, range(16), {*range(4), *range(8, 12)}),
        (TWO_SOCKETS, [3, 4, 5, 6, 12], {4, 5, 6, 12}),  # more of the second socket is allowed
        (TWO_SOCKETS, [5], {5}),
        (FOUR_PARTS, range(8), {0, 1, 2, 3}),  # a socket in two parts is one socket
        (FOUR_PARTS, [0, 4, 5, 6], {4, 5, 6}),
        (nodes(["0-7"], ["10"]), range(8), {*range(8)}),
        (nodes(["0-7", ""], ["10 40", "40 10"]), range(8), {*range(8)}),  # a node with memory alone
        (nodes(["0-3", "4-7"], ["", "x"]), range(8), {*range(8)}),
        ({}, range(6), {*range(6)}),
    ],
)
def test_one_socket_computes(
    tmp_path: Path, files: dict[str, str], allowed: Collection[int], chosen: set[int]
) -> None:
    write(tmp_path, files)
    assert thread_count.best_socket(allowed, tmp_path) == chosen


def test_a_socket_of_fast_cores_is_preferred_to_one_of_more_slow_cores(tmp_path: Path) -> None:
    name = "sys/devices/system/cpu/cpu{}/cpu_capacity"
    capacities = {name.format(cpu): "1024" if cpu >= 6 else "300" for cpu in range(10)}
    write(tmp_path, nodes(["0-5", "6-9"], ["10 21", "21 10"]) | capacities)
    assert thread_count.best_socket(range(10), tmp_path) == {6, 7, 8, 9}


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
@pytest.mark.parametrize("threads", ["None", "2"])
def test_the_runtime_stays_on_the_socket_unless_threads_are_given(threads: str, toy_bundle: Path) -> None:
    program = f"""
import os, pathlib; os.environ.pop("TVM_NUM_THREADS", None)
from mlcbuild_format import bundle
from mlcbuild_runtime.devices import cpu_library, thread_count
thread_count.best_socket = lambda allowed, root: frozenset({{min(allowed)}})
cpu_library.load_runtime(pathlib.Path(r"{toy_bundle}"), bundle.read(pathlib.Path(r"{toy_bundle}")), {threads})
print(len(os.sched_getaffinity(0)), os.environ["TVM_NUM_THREADS"])
"""
    count = len(os.sched_getaffinity(0))
    assert shared.run("-c", program).stdout == ("1 1\n" if threads == "None" else f"{count} 2\n")


def test_macos_states_the_cores_of_each_level() -> None:
    def speeds(answers: dict[str, str]) -> list[float]:
        return thread_count.apple_core_speeds(lambda name: answers.get(name, ""))

    small = {"hw.nperflevels": "2", "hw.perflevel0.physicalcpu": "4", "hw.perflevel1.physicalcpu": "4"}
    assert thread_count.best_count(speeds(small)) == 4
    assert len(speeds(small)) == 8
    assert speeds({"hw.physicalcpu": "6"}) == [1.0] * 6, "a Mac with an Intel processor"
    assert speeds({}) == []


@pytest.mark.parametrize(
    ("groups", "files", "granted"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 2),
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "max 1", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        ("0::/of/the/host", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (
            "3:cpu,cpuacct:/a\n2:memory:/a\n0::/",
            {
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        ("0::/", {}, None),
    ],
)
def test_control_groups_limit_threads(
    tmp_path: Path, groups: str, files: dict[str, str], granted: int | None
) -> None:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert thread_count._quota(tmp_path) == granted


@pytest.mark.skipif(sys.platform != "linux", reason="control groups and affinity are Linux's")
def test_affinity_limits_threads() -> None:
    program = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
    program += "from mlcbuild_runtime.devices.thread_count import default_threads; print(default_threads())"
    assert shared.run("-c", program).stdout == "1\n"
