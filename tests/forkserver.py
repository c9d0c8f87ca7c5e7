"""A fork server for tests: it starts `python -m MODULE ARGUMENT...` as a process that has imported its
modules already.

Most commands of the tests take longer to import their modules than to do their work. Here, too, each command
gets a separate process: it is forked from one that has only imported the modules, and it ends as Python ends.
Commands that depend on how Python starts still start Python: see `needs_python`.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")
"""Prefixes of environment variables that Python or the C library reads once, at its start."""

PRELOADED = (
    "mlcbuild.build.execute",
    "mlcbuild.bundles.provenance",
    "mlcbuild.checkpoints.conversion",
    "mlcbuild.ci.ci_reports",
    "mlcbuild.ci.shard_phases",
    "mlcbuild.cli.build",
    "mlcbuild.cli.listing",
    "mlcbuild.cli.receipts",
    "mlcbuild.cli.recipes",
    "mlcbuild.cli.store_access",
    "mlcbuild.cli.store_verbs",
    "mlcbuild.cli.summaries",
    "mlcbuild.compiler.cpu.action",
    "mlcbuild.compiler.cpu.toolchain",
    "mlcbuild.documents.schema",
    "mlcbuild.models.families.llama",
    "mlcbuild.quant.formats.f32",
    "mlcbuild.quant.formats.q4f16",
    "mlcbuild.quant.formats.q4s",
    "mlcbuild.remotes.archive",
    "mlcbuild.remotes.sharing",
    "mlcbuild.reports.report",
    "mlcbuild.session",
    "mlcbuild.store.export",
    "mlcbuild.store.receipt",
    "mlcbuild.store.upkeep",
    "mlcbuild_runtime.chat.chat_options",
    "mlcbuild_runtime.http.arguments",
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "cryptography.hazmat.primitives.serialization.ssh",
    "email.message",
    "email.parser",
    "encodings.utf_8_sig",
    "importlib.metadata",
    "jsonschema",
    "multiprocessing.connection",
    "numpy",
    "sqlite3",
    "tarfile",
    "xml.etree.ElementTree",
    "yaml",
    "tests.parsed_actions",
)


class Forked:
    """A process that a fork server has started, with the methods of subprocess.Popen that tests use."""

    def __init__(self, args: list[str], server: socket.socket, files: Sequence[IO[bytes]]) -> None:
        """Represents a process that the fork server has started: reads its id from the connection `server`,
        which delivers the exit code later. files: the process's standard output and standard error, or none.
        """
        self.args = args
        self.returncode: int | None = None
        self._server, self._files = server, files
        self.pid = self._number()

    def _number(self) -> int:
        digits = b""
        while not digits.endswith(b"\n"):
            byte = self._server.recv(1)
            assert byte, "the fork server has ended"
            digits += byte
        return int(digits)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._number()
            self._server.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end of the process. Returns (standard output, standard error)."""
        self.wait(timeout)
        out, err = ((file.seek(0), file.read().decode())[1] for file in self._files)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for file in self._files:
            file.close()


Process = Forked | subprocess.Popen[str]
Stream = IO[bytes] | IO[str] | int
"""An open file or its descriptor."""


class ForkServer:
    """Starts commands as forks of one server process, which is started together with the first command."""

    def __init__(
        self,
        root: Path = ROOT,
        preloaded: Sequence[str] = PRELOADED,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Prepares a fork server, which the first command starts. root: this checkout or a copy of it;
        preloaded: the modules that the server imports; variables: environment variables for it in addition to
        those of this process."""
        self._root = root
        self._preloaded = preloaded
        self._variables = dict(variables or {})
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        timeout: float | None = None,
        before: Sequence[str] = (),
        *,
        stdin: str | bytes = "",
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python -m module arguments...` without a terminal, and returns the ended process, as
        subprocess.run does.

        timeout: in seconds; before: a command that runs the command line as its last arguments; stdin: what
        the process reads from its standard input, a pipe, if it is not empty; at most PIPE_BYTES. Raises
        subprocess.TimeoutExpired.
        """
        if before:
            return subprocess.run(
                [*before, sys.executable, "-m", module, *arguments],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        with (
            _piped(stdin) if stdin else nullcontext() as read_end,
            self.start(module, arguments, cwd, environment, stdin=read_end) as process,
        ):
            try:
                texts = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.wait(), *texts)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        output: Stream | None = None,
        *,
        errors: Stream | None = None,
        stdin: Stream | None = None,
        session: bool = False,
    ) -> Process:
        """Starts `python -m module arguments...` without a terminal, and returns the process.

        output: file for standard output; errors: file for standard error, by default the same; without both,
        `communicate` returns what is written there; stdin: file for standard input, by default /dev/null;
        session: True to start a new process group.
        """
        command = [sys.executable, "-m", module, *arguments]
        if needs_python(environment, self._variables):
            return subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=output or subprocess.PIPE,
                stderr=errors or output or subprocess.PIPE,
                text=True,
                start_new_session=session,
            )
        request = {
            "module": module,
            "arguments": arguments,
            "cwd": str(cwd),
            "environment": dict(environment),
            "session": session,
        }
        texts = [] if output else [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - Forked closes them
        outputs = [output, errors or output] if output else texts
        ours, theirs = socket.socketpair()
        with theirs:
            files = (theirs, *outputs, *(() if stdin is None else (stdin,)))
            descriptors = [file if isinstance(file, int) else file.fileno() for file in files]
            socket.send_fds(self._started(), [b"+"], descriptors)
        ours.sendall(json.dumps(request).encode() + b"\n")
        return Forked(command, ours, texts)

    def _started(self) -> socket.socket:
        with self._starting:
            if self._control is None:
                self._control, theirs = socket.socketpair()
                environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
                environment |= self._variables
                if self._root != ROOT:
                    copies = [self._root, self._root / "runtime", ROOT]
                    environment["PYTHONPATH"] = os.pathsep.join(map(str, copies))
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tests.forkserver", str(theirs.fileno()), *self._preloaded],
                        cwd=self._root,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                    )
            return self._control

    def close(self) -> None:
        """Ends the server process. All commands must have ended before."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
            self._control = self._process = None


PIPE_BYTES = 1 << 16
"""Bytes that a pipe holds on Linux before a writer waits for a reader."""


@contextmanager
def _piped(text: str | bytes) -> Iterator[IO[bytes]]:
    """Yields the read end of a pipe that holds a text of at most PIPE_BYTES and then ends."""
    data = text.encode() if isinstance(text, str) else text
    assert len(data) <= PIPE_BYTES
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read_end:
        with os.fdopen(writing, "wb") as write_end:
            write_end.write(data)
        yield read_end


COMMANDS = ForkServer()
"""The fork server with which this test process starts commands and builds."""


def needs_python(environment: Mapping[str, str], of_server: Mapping[str, str] | None = None) -> bool:
    """Returns True if a command must start a new Python process, because its environment changes how Python
    starts. of_server: environment variables that only the fork server has."""

    def start(variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if name.startswith(READ_AT_START) and name != "PYTHONPATH"
        }

    return not hasattr(os, "pidfd_open") or start(environment) != start({**os.environ, **(of_server or {})})


def serve(control: socket.socket) -> tuple[str, list[str]] | None:
    """Forks a process for each request that arrives. In each of these processes, returns (module to run, its
    arguments); in the server itself, returns None when it ends."""
    waiting: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> process and its client
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in waiting:
                    selector.unregister(key.fd)
                    _report(key.fd, *waiting.pop(key.fd))
                    continue
                byte, descriptors, _, _ = socket.recv_fds(control, 1, 4)
                if not byte:
                    return None
                client = socket.socket(fileno=descriptors[0])
                with client.makefile("rb") as lines:
                    request = json.loads(lines.readline())
                pid = os.fork()
                if pid == 0:
                    for other in waiting:
                        os.close(other)
                    for _, connection in waiting.values():
                        connection.close()
                    client.close()
                    control.close()
                    return _become(request, descriptors[1:])
                for descriptor in descriptors[1:]:
                    os.close(descriptor)
                client.sendall(b"%d\n" % pid)
                watched = os.pidfd_open(pid)
                waiting[watched] = (pid, client)
                selector.register(watched, selectors.EVENT_READ)


def _report(watched: int, pid: int, client: socket.socket) -> None:
    """Sends the exit code of an ended process to the client, negative for a signal as in subprocess."""
    _, status = os.waitpid(pid, 0)
    os.close(watched)
    with client, suppress(BrokenPipeError):  # the waiting client may have given up
        client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(request: Mapping[str, object], files: Sequence[int]) -> tuple[str, list[str]]:
    """Sets environment, working directory and standard files of this process as the request states, and
    returns (module to run, its arguments). files: descriptors for standard output, standard error and, if it
    is not to be that of the server, standard input."""
    if request["session"]:
        os.setsid()
    environment, arguments, cwd = request["environment"], request["arguments"], str(request["cwd"])
    assert isinstance(environment, dict) and isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, descriptor in zip((1, 2, 0), files, strict=False):
        os.dup2(descriptor, number)
        os.close(descriptor)
    directories = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = dict.fromkeys([cwd, *directories, *sys.path[1:]])
    return str(request["module"]), arguments


def main(descriptor: int, preloaded: Sequence[str]) -> int:
    for name in preloaded:
        import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process must not touch, and so copy, these pages
    with socket.socket(fileno=descriptor) as control:
        command = serve(control)
    if command is None:
        return 0
    module, sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
