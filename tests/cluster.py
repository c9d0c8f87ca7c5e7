"""Starts a real dask.distributed scheduler and its workers for tests; each worker is a process with a
separate store."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.forkserver import PRELOADED, ForkServer, Process

ROOT = Path(__file__).resolve().parent.parent
QUIET = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "2",
    "DASK_DISTRIBUTED__ADMIN__TICK__LIMIT": "60s",
}

SERVER = ForkServer(preloaded=(*PRELOADED, "distributed", "distributed.cli.utils", "click"), variables=QUIET)
atexit.register(SERVER.close)


@dataclass
class Cluster:
    place: Path
    arguments: tuple[str, ...] = ()
    """Command-line arguments that are added when the dask scheduler and each worker are started."""
    address: str = ""
    processes: list[Process] = field(default_factory=list)

    def start(self) -> None:
        """Starts a dask scheduler on a free port."""
        file = self.place / "scheduler.json"
        tls = [f"--tls-{part}={self.place}/tls/{name}.pem" for part, name in TLS] if self.arguments else []
        command = ["distributed.cli.dask_scheduler", "--host", "tls://127.0.0.1" if tls else "127.0.0.1"]
        self._run(
            [*command, "--port", "0", "--no-dashboard", "--scheduler-file", str(file), *tls], "scheduler"
        )
        _wait(lambda: file.exists() and b"address" in file.read_bytes(), "the scheduler")
        self.address = "dask://" + json.loads(file.read_bytes())["address"].partition("://")[2]

    def worker(self, name: str, *arguments: str, store: Path | None = None) -> Process:
        """Starts a worker and returns its process. It uses `store`, or a new store below `place`."""
        where = str(store or self.place / name)
        command = ["mlcbuild", "worker", self.address, "--name", name, "--store", where]
        inputs = [] if "--cores" in arguments else ["--cores", "1", "--memory", "2GB"]
        return self._run([*command, *inputs, *arguments, *self.arguments], name)

    def wait(self, *names: str) -> None:
        for name in names:
            _wait(lambda name=name: "ready" in self.said(name), f"the worker {name}")

    def named(self, name: str) -> Process:
        return next(process for process in self.processes if name in process.args)  # type: ignore[operator]

    def declare_dead(self, worker: Process) -> None:
        """Suspends a worker process (SIGSTOP) and removes it from the scheduler, which then regards it as
        lost."""
        from distributed import Client

        async def remove(address: str, dask_scheduler: Any = None) -> None:
            await dask_scheduler.remove_worker(address, stimulus_id="test", close=False)

        with Client("tcp://" + self.address.partition("://")[2], set_as_default=False) as client:
            actual = client.scheduler_info(n_workers=-1)["workers"]
            address = next(url for url, facts in actual.items() if facts["name"] in worker.args)  # type: ignore[operator]
            worker.send_signal(signal.SIGSTOP)
            client.run_on_scheduler(remove, address)

    def said(self, name: str) -> str:
        return (self.place / f"{name}.txt").read_text()

    def _run(self, command: list[str], name: str) -> Process:
        module, *arguments = command
        environment = {**os.environ, **QUIET, "XDG_CONFIG_HOME": str(self.place / "no-config")}
        with (self.place / f"{name}.txt").open("wb") as output:
            process = SERVER.start(module, arguments, ROOT, environment, output)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self.processes:
            process.wait()


TLS = (("ca-file", "ca"), ("cert", "cert"), ("key", "key"))


@contextlib.contextmanager
def started(place: Path, *arguments: str) -> Iterator[Cluster]:
    place.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(place, arguments)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def _wait(ready: object, what: str) -> None:
    end = time.monotonic() + 200
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < end, f"{what} did not start"
        time.sleep(0.05)
