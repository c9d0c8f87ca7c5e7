"""The things that a test disturbs while mlcbuild works: a recipe with its store and bundles, a shared cache,
and a server of a bundle with clients that check its answers.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from tests.caches import Cache, Handler, serving
from tests.conftest import ROOT, TINY

RECIPE = """\
version: 1
name: chaos
models: {{tiny: ./tiny}}
quantizations: [q4f16_1, q4a8_1]
targets: [host]
compile: {{context_window: 128, prefill_chunk: 64, max_batch: 4}}
cache: {{remotes: [{{url: "{url}"}}]}}
"""
NAMES = ("tiny-q4f16_1-host", "tiny-q4a8_1-host")
PATIENCE = 280
"""Limit in seconds for a command of mlcbuild under test, which counts as hanging once it has used more CPU
seconds than this in all, or no CPU time for as many seconds in a row. A server under test must start within
the limit, too."""


class ViolationError(Exception):
    """The error for a command of mlcbuild that succeeded with a wrong bundle, hung or printed a traceback,
    for a build that fails twice in a row after a disturbance, and for a server that does not start or answers
    wrongly."""


def tree(directory: Path) -> str:
    """Returns the SHA-256, in hex, of the relative paths, sizes and bytes of all files below a directory, in
    sorted order."""
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(directory)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def cpu_seconds(group: int) -> float:
    """Returns the CPU seconds that the live processes of a process group have used, including those of their
    ended children that they have waited for. group: id of the process group."""
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Site:
    """A directory with a recipe that was built once without disturbances. The digests of its bundles are
    kept, and bundles that are built later must have the same ones.
    """

    def __init__(self, place: Path, random: Random, cache: Cache) -> None:
        self.place, self.random, self.cache = place, random, cache
        self.store, self.dist = place / "store", place / "dist"
        self.delay = 0.0
        cache.fault = self._slow
        shutil.copytree(TINY, place / "tiny")
        (place / "recipe.yaml").write_text(RECIPE.format(url=cache.url))
        self.digests: dict[str, str] = {}
        self.must_build("the first run")
        self.digests = {name: tree(self.dist / name) for name in NAMES}

    def _slow(self, handler: Handler) -> bool:
        time.sleep(self.delay)
        return False

    def start(self, *arguments: str, extra: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command of mlcbuild in a separate process group, with the site's store, and returns the
        process. Its standard output and standard error go to one pipe, `stdout`. arguments: the command;
        extra: further environment variables."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLCBUILD_")}
        environment |= {"MLCBUILD_STORE": str(self.store), "XDG_CONFIG_HOME": str(self.place)}
        return subprocess.Popen(
            [sys.executable, "-m", "mlcbuild", *arguments],
            cwd=self.place,
            env={**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}", **(extra or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str], why: str) -> tuple[int, str]:
        """Waits for a command of mlcbuild and returns (exit code, printed text). Raises ViolationError, and
        kills the command if it still runs, if it hangs or prints a traceback. why: the disturbance, for
        messages.
        """
        spent, end = 0.0, time.monotonic() + PATIENCE
        while True:
            try:
                text, _ = process.communicate(timeout=5)
                break
            except subprocess.TimeoutExpired:
                if (now := cpu_seconds(process.pid)) > spent:
                    spent, end = now, time.monotonic() + PATIENCE
                if spent > PATIENCE or time.monotonic() > end:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
                    raise ViolationError(f"{why}: no end after {spent:.0f} s of CPU time") from None
        if "Traceback" in text or "a defect of mlcbuild" in text:
            raise ViolationError(f"{why}: {text[-600:]}")
        return process.returncode, text

    def run(self, why: str, extra: Mapping[str, str] | None = None) -> int:
        """Runs `mlcbuild run` with the recipe once and returns the exit code. Raises ViolationError if the
        run hangs or prints a traceback, or if the code is 0 and a bundle fails verification or differs from
        that of the first, undisturbed run. why: the disturbance, for messages; extra: further environment
        variables of the run."""
        code, text = self.finish(self.start("run", "recipe.yaml", extra=extra), why)
        if code == 0:
            self.check(why, text)
        return code

    def must_build(self, why: str) -> None:
        """Runs `mlcbuild run` with the recipe up to two times, until it succeeds. Raises ViolationError if
        both runs fail, or if one hangs, prints a traceback or succeeds with a wrong bundle. why: the
        disturbance before the runs, for messages.
        """
        if self.run(why) and self.run(f"{why}, again"):
            _, text = self.finish(self.start("run", "recipe.yaml"), why)
            raise ViolationError(f"{why}: two runs after it fail: {text[-600:]}")

    def check(self, why: str, text: str) -> None:
        for name in NAMES:
            code, output = self.finish(self.start("verify", f"dist/{name}"), why)
            if code:
                raise ViolationError(
                    f"{why}: the run ends with 0, and {name} does not verify: {output[-300:]}"
                )
            if self.digests and tree(self.dist / name) != self.digests[name]:
                raise ViolationError(
                    f"{why}: the run ends with 0, and {name} is another bundle\n{text[-600:]}"
                )

    def forget_bundles(self) -> None:
        shutil.rmtree(self.dist, ignore_errors=True)

    def forget_store(self) -> None:
        shutil.rmtree(self.store, ignore_errors=True)


@contextmanager
def site(place: Path, random: Random) -> Iterator[Site]:
    with serving() as cache:
        yield Site(place, random, cache)


class Service:
    """Starts a server of a bundle, and client threads that each send it one of eight fixed requests, chosen
    at random, again and again. They append a message to the list `wrong` for each answer that differs from
    the first one to the same request, and for each request that fails while the server is up; `check` raises
    ViolationError with the first message."""

    def __init__(self, bundle: Path, clients: int) -> None:
        self.bundle, self.answers, self.wrong = bundle, 0, list[str]()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.lives, self.ready, self.ending = 0, False, threading.Event()
        self.start()
        self.expected = {number: self.ask(number) for number in range(8)}
        self.threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(clients)]
        for thread in self.threads:
            thread.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlcbuild_runtime", str(self.bundle), "--port", str(self.port)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, **quiet)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health/ready")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                raise ViolationError(f"the server does not start: {self.process.poll()}")
            time.sleep(0.1)
        self.lives, self.ready = self.lives + 1, True

    def ask(self, number: int) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {
            "prompt": [10 + number] * (3 + 7 * number),
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                raise ConnectionError(f"status {answer.status}: {data[:200]!r}")
            return str(json.loads(data)["choices"][0]["text"])
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from None
        finally:
            connection.close()

    def _work(self, number: int) -> None:
        random = Random(number)
        while not self.ending.is_set():
            life, which = self.lives, random.randrange(8)
            try:
                text = self.ask(which)
            except OSError as error:
                time.sleep(0.2)
                if life == self.lives and self.ready and not self.ending.is_set():
                    self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            self.answers += 1
            if text != self.expected[which]:
                self.wrong.append(f"{text!r} instead of {self.expected[which]!r}")
            time.sleep(0.1)

    def kill(self) -> None:
        self.ready = False
        self.process.kill()
        self.process.wait()
        self.start()

    def check(self, why: str) -> None:
        if self.wrong:
            raise ViolationError(f"{why}: a client got {self.wrong[0]}")

    def close(self) -> None:
        self.ending.set()
        self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join(5)
