"""A fork server for tests: it starts `python -m MODULE ARGUMENT...` as a process that has imported its
modules already.

Most commands of the tests take longer to import their modules than to do their work. Here, too, each command
gets a separate process: it is forked from one that has only imported the modules, and it ends as Python ends.
Commands that depend on how Python starts still start Python: see `needs_python`.
"""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import select
import selectors
import shlex
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

from tests.fork_client import read_at_start

ROOT = Path(__file__).resolve().parent.parent
CLIENT = Path(__file__).with_name("fork_client.py")
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
        self._directory: tempfile.TemporaryDirectory[str] | None = None
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

    def write_script(self, path: Path, module: str) -> None:
        """Writes a shell script that runs `python -m module` with its arguments, as a fork of this server."""
        words = [sys.executable]
        if needs_python(os.environ, self._variables):
            words += ["-m", module]
        else:
            start = json.dumps(read_at_start({**os.environ, **self._variables}))
            words += ["-IS", str(CLIENT), self._address(), start, module]
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)

    def _address(self) -> str:
        """Returns the path of the Unix domain socket to which `tests/fork_client.py` connects."""
        control = self._started()
        with self._starting:
            if self._directory is None:
                self._directory = tempfile.TemporaryDirectory(prefix="forks-")  # names of sockets are short
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(f"{self._directory.name}/socket")
                    listener.listen(100)
                    socket.send_fds(control, [b"@"], [listener.fileno()])
            return f"{self._directory.name}/socket"

    def close(self) -> None:
        """Ends the server process. All commands must have ended before."""
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
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

    ours = read_at_start({**os.environ, **(of_server or {})})
    return not hasattr(os, "pidfd_open") or read_at_start(dict(environment)) != ours


class Server:
    """The loop of the fork server's process, which forks a process for each request that arrives."""

    def __init__(self, control: socket.socket) -> None:
        """control: the connection to the test process, whose end is the server's end."""
        self._control = control
        self._listeners: list[socket.socket] = []
        self._waiting: dict[int, tuple[int, socket.socket]] = {}
        """pidfd -> (process id, connection on which its id and exit code are sent)."""
        self._clients: dict[socket.socket, int] = {}
        """Connection of `tests/fork_client.py` -> id of the process that ends with it."""

    def serve(self) -> tuple[str, list[str]] | None:
        """In each forked process, returns (module to run, its arguments); in the server itself, returns None
        when it ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    if isinstance(source, int):
                        if source in self._waiting:
                            selector.unregister(source)
                            self._report(selector, source)
                        continue
                    assert isinstance(source, socket.socket)
                    if source in self._clients:  # the client was killed
                        selector.unregister(source)
                        os.kill(self._clients.pop(source), signal.SIGKILL)
                        continue
                    is_script = source in self._listeners
                    connection = source.accept()[0] if is_script else source
                    byte, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
                    if byte == b"@":
                        self._listeners.append(socket.socket(fileno=descriptors[0]))
                        selector.register(self._listeners[-1], selectors.EVENT_READ)
                        continue
                    if not byte and is_script:
                        connection.close()
                        continue
                    if not byte:
                        return None
                    client = connection if is_script else socket.socket(fileno=descriptors.pop(0))
                    command = self._fork(selector, client, descriptors)
                    if command is not None:
                        return command
                    if is_script:
                        self._clients[client] = next(reversed(self._waiting.values()))[0]
                        selector.register(client, selectors.EVENT_READ)

    def _fork(
        self, selector: selectors.BaseSelector, client: socket.socket, descriptors: list[int]
    ) -> tuple[str, list[str]] | None:
        """Reads a request from `client` and forks a process for it. Returns (module to run, its arguments) in
        that process, and None in the server. descriptors: as for `_become`."""
        with client.makefile("rb") as lines:
            request = json.loads(lines.readline())
        pid = os.fork()
        if pid == 0:
            for other in self._waiting:
                os.close(other)
            for _, connection in self._waiting.values():
                connection.close()
            for each in (client, self._control, *self._listeners):
                each.close()
            return _become(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(BrokenPipeError):
            client.sendall(b"%d\n" % pid)
        watched = os.pidfd_open(pid)
        self._waiting[watched] = (pid, client)
        selector.register(watched, selectors.EVENT_READ)
        return None

    def _report(self, selector: selectors.BaseSelector, watched: int) -> None:
        """Sends the exit code of an ended process to the client, negative for a signal as in subprocess."""
        pid, client = self._waiting.pop(watched)
        _, status = os.waitpid(pid, 0)
        os.close(watched)
        if self._clients.pop(client, None) is not None:
            selector.unregister(client)
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
    _open_streams()
    directories = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = dict.fromkeys([cwd, *directories, *sys.path[1:]])
    return str(request["module"]), arguments


def _open_streams() -> None:
    """Opens the standard streams again, as Python does at its start. The objects of before hold what was true
    of the server's files: whether they have positions, and whether they are terminals."""
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        before = getattr(sys, name)
        stream = io.TextIOWrapper(
            open(descriptor, f"{mode}b", closefd=False),  # noqa: SIM115
            encoding=before.encoding,
            errors=before.errors,
            newline=None if mode == "r" else "\n",
            line_buffering=name == "stderr" or before.write_through or os.isatty(descriptor),
            write_through=before.write_through,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main(descriptor: int, preloaded: Sequence[str]) -> int:
    for name in preloaded:
        import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process must not touch, and so copy, these pages
    with socket.socket(fileno=descriptor) as control:
        command = Server(control).serve()
    if command is None:
        return 0
    module, sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
