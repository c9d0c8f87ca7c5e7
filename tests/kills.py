"""Kills builders at random moments, fills disks and shifts clocks, and checks that builds survive.

`ci/bench/kills` does this at length, `tests/store/test_kills.py` briefly.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from mlcbuild.canon import file_digest
from mlcbuild.remotes.signing import unseal
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests.forkserver import COMMANDS, Process

ROOT = Path(__file__).resolve().parent.parent
VICTIMS = ("builder", "worker", "uploader")
ROUND = 5
"""Number of kills after which a build is completed and the store and the remote are compared with the
expected results."""
FAKETIME = next(
    (
        path
        for path in sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
        if path.exists() and sys.platform == "linux"
    ),
    None,
)


def records(store: Path) -> dict[str, object]:
    """Returns key -> files and digests of each record in a store or a remote, without the durations of steps,
    which may differ.
    """
    actual = (path for path in (store / "ac").rglob("*") if path.is_file())
    first = {path.name: json.loads(path.read_bytes().partition(b"\n")[0]) for path in actual}
    return {key: (line["files"], line["tree"]) for key, line in first.items()}


def blobs(store: Path) -> set[str]:
    return {path.name for path in (store / "cas").rglob("*") if path.is_file()}


def faults(place: Path) -> list[str]:
    """Returns error messages about all damage in the subdirectories `store` and `remote` of `place`: content
    that does not match its digest, missing files, and records that refer to them. The list is empty if both
    are sound."""
    results = []
    if (place / "store" / "store.json").exists():
        report = verify(Store(place / "store"))
        results = [*report.damaged, *report.missing]
    remote = place / "remote"
    results += [f"remote: {path}" for path in (remote / "cas").glob("*") if file_digest(path) != path.name]
    there = blobs(remote)
    for path in (remote / "ac").glob("*"):
        record = unseal(path.name, path.read_bytes(), ())
        results += [
            f"remote: {row[0]} of {path.name} is not there" for row in record.rows if row[1] not in there
        ]
    return results


@dataclass
class Site:
    """A source, a store and a remote with which builder processes work, and the result of an undisturbed
    build."""

    place: Path
    seed: int
    environment: Mapping[str, str] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        source = self.place / "source"
        source.mkdir(parents=True)
        (source / "data").write_bytes(random.Random("source").randbytes(200_000))  # random data
        self.clear()
        self.complete()
        self.whole = records(self.place / "store"), blobs(self.place / "store")
        assert len(self.whole[0]) == 9

    def clear(self) -> None:
        """Deletes the store and the remote of these builds with all contents, and creates an empty directory
        for the remote."""
        for name in ("store", "remote"):
            shutil.rmtree(self.place / name, ignore_errors=True)
        (self.place / "remote").mkdir()

    def build(self, limit: int | None = None, variables: Mapping[str, str] = MappingProxyType({})) -> Process:
        """Starts a builder in a new process group and returns its process. limit: maximum bytes of a file
        that it may write; None: no limit."""

        def before() -> None:
            assert limit is not None
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        arguments = [str(self.place / "store"), "heavy", str(self.place / "source"), "pool"]
        arguments.append(f"file://{self.place}/remote")
        environment = {**os.environ, **self.environment, **variables}
        if limit is None:
            return COMMANDS.start("tests.builder", arguments, ROOT, environment, session=True)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.builder", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=before,  # noqa: PLW1509 - there are no threads here
        )

    def finish(self, process: Process, code: int | None = 0) -> str:
        with process:
            _, text = process.communicate(timeout=250)
        assert code is None or process.returncode == code, text
        assert "Traceback" not in text, text
        return text

    def complete(self) -> None:
        """Runs one build, undisturbed, with this store and this remote to its end. Raises AssertionError if
        it fails or prints a traceback."""
        self.finish(self.build())

    def check(self) -> None:
        actual = faults(self.place)
        assert not actual, actual

    def compare(self) -> None:
        """Asserts that the store and the remote contain exactly the records and blobs of an undisturbed
        build, without damage, and that temporary files and locks are removed by the next use of the store."""
        self.check()
        store, remote = self.place / "store", self.place / "remote"
        assert (records(store), blobs(store)) == self.whole
        assert (records(remote), blobs(remote)) == self.whole
        # A run without work does not clean up; the next one with work does, once killed processes are gone.
        for _ in range(600):
            with Store(store).staging():
                pass
            left = [*(store / "tmp").iterdir(), *(store / "locks").iterdir()]
            if not left:
                break
            time.sleep(0.1)
        assert not left, left

    def kill(self, victim: str) -> None:
        """Starts a build, kills one of its processes with SIGKILL at a random moment, and asserts that store
        and remote are undamaged. victim: "worker" for a worker process, "uploader" for the builder while it
        uploads a file; any other name for the builder."""
        process = self.build()
        if victim == "uploader":
            self._wait(process, lambda: any((self.place / "remote" / "tmp").glob("*")))
            time.sleep(self.random.uniform(0.0, 0.01))
        else:
            self._wait(process, lambda: any((self.place / "store" / "tmp").glob("*/*")))
            time.sleep(self.random.uniform(0.0, 0.4))
        if victim == "worker":
            chosen = children(process.pid)
            if chosen:
                self._shoot(self.random.choice(chosen), victim)
            self.finish(process, None)
        else:
            if process.poll() is None:
                self._shoot(process.pid, victim)
            with process:
                process.communicate()
        self.check()

    def _shoot(self, pid: int, victim: str) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills[victim] += 1

    def _wait(self, process: Process, observed: Callable[[], bool]) -> None:
        while process.poll() is None and not observed():
            time.sleep(0.002)


def children(parent: int) -> list[int]:
    result = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in result.stdout.splitlines()]
    return [int(pid) for pid, owner in rows if int(owner) == parent]


def kill_many(
    place: Path, count: int, seed: int, output: Callable[[str], None] = lambda _: None
) -> Counter[str]:
    """Kills `count` processes in rounds, and returns kind of process -> number of those that were killed."""
    site = Site(place, seed)
    while site.kills.total() < count:
        site.clear()
        goal = min(count, site.kills.total() + ROUND)
        idle = 0
        while site.kills.total() < goal and idle < 3:
            before = site.kills.total()
            site.kill(site.random.choice(VICTIMS))
            idle = idle + 1 if site.kills.total() == before else 0  # all is built: nothing to kill
        site.complete()
        site.compare()
        output(f"{site.kills.total()} kills, nothing lost: {dict(site.kills)}")
    return site.kills


def fill_disk(place: Path, seed: int) -> None:
    """Checks builds under a limit of file sizes, at which some results fail with "no space is left", and
    their completion after the limit is removed."""
    site = Site(place, seed)
    for limit in (1500, 150_000):
        site.clear()
        text = site.finish(site.build(limit), 1)
        assert "no space is left" in text, text
        site.check()
        site.complete()
        site.compare()


def full_file_system(place: Path, seed: int) -> None:
    """Checks builds on a small file system, mounted on the store of `place`, that is full at first and has
    space later."""
    site = Site(place, seed)
    for size in ("300k", "900k", "1500k"):
        site.clear()
        store = place / "store"
        store.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(store)], check=True)
        try:
            text = site.finish(site.build(), None)
            assert "no space is left" in text, text
            site.check()
            subprocess.run(["mount", "-o", "remount,size=64m", str(store)], check=True)
            site.complete()
            site.compare()
        finally:
            subprocess.run(["umount", str(store)], check=True)


def can_mount(place: Path) -> bool:
    """Returns True if this process may mount a tmpfs."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    place.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], capture_output=True, check=False
    )
    if result.returncode == 0:
        subprocess.run(["umount", str(place)], check=True)
    return result.returncode == 0


def skew_clocks(place: Path, seed: int) -> None:
    """Builds with clocks that are wrong by 400 days, and with input files whose modification times are 400
    days off. Asserts that equal bytes are reused and changed bytes are detected even under the same file
    time, and that the results equal those of an undisturbed build. place: empty directory for the builds."""
    site = Site(place, seed)
    data = place / "source" / "data"
    original = data.read_bytes()
    shifts = ("-400d", "+400d") if FAKETIME is not None else ("",)
    for shift in shifts:
        fake = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": shift, "FAKETIME_NO_CACHE": "1"} if shift else {}
        site.clear()
        site.finish(site.build(variables=fake))
        site.complete()
        site.compare()
        for days in (-400, 400):
            moment = time.time() + days * 86_400
            os.utime(data, (moment, moment))
            assert "9 reused" in site.finish(site.build(variables=fake)), "the same bytes have the same key"
            fresh = site.random.randbytes(len(original))
            data.write_bytes(fresh)  # as long as before, and then with the same time
            os.utime(data, (moment, moment))
            assert "0 reused" in site.finish(site.build(variables=fake)), (
                "other bytes are seen whatever the clock says"
            )
            data.write_bytes(original)
            os.utime(data, (moment, moment))
            site.finish(site.build(variables=fake))
        site.check()
