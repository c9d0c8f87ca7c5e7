"""Helpers for tests in several processes: directories that are built once for a whole run, and server
processes."""

from __future__ import annotations

import atexit
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.forkserver import ForkServer, Process

ROOT = Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("MLCBUILD_TEST_DEVICE", "cpu")
"""Device for which the fixtures' bundles are built: "cpu", or "webgpu", with which the engine's tests run on
this machine's GPU adapter, with a real model in place of the toy model."""
TOYS = ("cpu_toy_bundle", "numpy_toy_bundle") if DEVICE == "cpu" else ("webgpu_real_toy_bundle",)
"""Names of the fixtures of toy bundles, one for each device on which the engine's tests run."""
WAIT = 60.0
"""Seconds to wait for a server, which is slow on a machine that is busy with other tests."""
ERRORS = 2
"""File descriptor of the standard error of this process."""
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""TLS settings that are passed to httpx, although these servers speak plain HTTP. Otherwise httpx would load
the certificates of all authorities for each request, which takes 21 ms of CPU time."""

PRELOADED = (
    "mlcbuild_runtime.chat.chat_options",
    "mlcbuild_runtime.devices.cpu",
    "mlcbuild_runtime.engine.served_models",
    "mlcbuild_runtime.http.arguments",
    "mlcbuild_runtime.http.draining",
    "mlcbuild_runtime.http.logs",
    "mlcbuild_runtime.http.server",
    "mlcbuild_runtime.local",
    "encodings.idna",
    "numpy.ctypeslib",
    "tokenizers",
    "uvicorn.lifespan.off",
    "uvicorn.loops.auto",
)
PROGRAMS = ForkServer(preloaded=PRELOADED, variables={"PYTHONUNBUFFERED": "1"})
"""The fork server with which this test process starts programs of the runtime. Python's own start and the
imports are most of the half CPU second that a server takes until it is ready."""
atexit.register(PROGRAMS.close)


def once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """Returns a directory, shared by all test processes of a run, that `build` fills: it is called in the
    first process that requests the directory `name`, and the others wait. Raises RuntimeError in the others
    if `build` fails or takes too long."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    final, failed, lock = root / name, root / f"{name}.failed", root / f"{name}.lock"
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        end = time.monotonic() + 4 * WAIT
        while not final.exists():
            if failed.exists() or time.monotonic() > end:
                raise RuntimeError(f"{name} could not be built; another process has the reason") from None
            time.sleep(0.05)
        return final
    try:
        part = root / f"{name}.part"
        build(part)
        part.rename(final)
    except BaseException:
        failed.touch()
        raise
    return final


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a child process that uses the runtime of this checkout, with one thread,
    since other tests run beside."""
    by_name = {key: value for key, value in os.environ.items() if not key.startswith("TVM_")}
    variables = {"PYTHONPATH": str(ROOT / "runtime"), "PYTHONUNBUFFERED": "1", "TVM_NUM_THREADS": "1"}
    return {**by_name, **variables, **(extra or {})}


def run(
    *arguments: str, stdin: str = "", extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments in a child process to its end, with the runtime of this checkout, and
    returns its exit code and output. stdin: text of its standard input; extra: further environment variables.
    Raises TimeoutExpired after WAIT seconds."""
    if arguments[0] == "-m":
        return PROGRAMS.run(arguments[1], arguments[2:], Path.cwd(), environment(extra), WAIT, stdin=stdin)
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(extra),
        timeout=WAIT,
        check=False,
    )


@dataclass(frozen=True)
class Server:
    process: Process
    output: IO[str]
    """Pipe of the server's standard output, from the line after `ready` on."""
    url: str
    ready: str
    """The line on standard output by which the server reported that it accepts requests."""
    name: str

    def health(self) -> dict[str, int | str | bool]:
        document: dict[str, int | str | bool] = httpx.get(
            f"{self.url}/health", timeout=WAIT, verify=PLAIN
        ).json()
        return document

    def wait_idle(self) -> dict[str, int | str | bool]:
        """Waits until no request runs or waits, and returns the document of the server's health check."""
        end = time.monotonic() + WAIT
        while (actual := self.health())["running"] or actual["waiting"]:
            assert time.monotonic() < end, actual
            time.sleep(0.01)
        return actual

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Sends the signal `number`, by default SIGINT, to the server process and returns the process's exit
        code. Raises TimeoutExpired if the process has not ended after WAIT seconds."""
        self.process.send_signal(number)
        return self.process.wait(WAIT)


def busy(seconds: float) -> float:
    """Returns the CPU seconds that this process gets in `seconds` of wall-clock time if it never sleeps: on a
    busy machine less than one per second."""
    before, end = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return time.process_time() - before


@contextmanager
def serving(bundle: Path, *options: str, extra: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Starts a real server process for a bundle on a free port, and yields it. options: further options of
    the command line; extra: further environment variables."""
    with program("-m", "mlcbuild_runtime", str(bundle), "--port", "0", *options, extra=extra) as running:
        yield running


@contextmanager
def program(*arguments: str, extra: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Starts a server as a Python child process with these arguments, waits for the line with its address,
    and yields it. extra: further environment variables. At the end the process is killed."""
    read_end, write_end = os.pipe()
    with (
        os.fdopen(read_end) as output,
        os.fdopen(write_end, "w") as theirs,
        _started(arguments, theirs, environment(extra)) as process,
    ):
        try:
            theirs.close()  # The end of the process is then the end of its output.
            ready = output.readline()
            match = re.search(r"(\S+) (?:is ready|models are served) at (\S+)", ready)
            assert match is not None, (ready, process.wait(WAIT))
            yield Server(process, output, match[2], ready, match[1])
        finally:
            process.kill()


def _started(arguments: Sequence[str], output: IO[str], variables: Mapping[str, str]) -> Process:
    """Starts Python with these arguments and environment variables. Its standard output is the file `output`,
    its standard error that of this process."""
    if arguments[0] == "-m":
        return PROGRAMS.start(arguments[1], arguments[2:], Path.cwd(), variables, output, errors=ERRORS)
    # A program's text may change a constant before the modules that copy it are imported.
    return subprocess.Popen([sys.executable, *arguments], stdout=output, text=True, env=variables)
