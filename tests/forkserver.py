"""A fork server for tests: it starts `python -m MODULE ARGUMENT...` as a process that has imported its
modules already.

Most commands of the tests take longer to import their modules than to do their work. Here, too, each command
gets a separate process: it is forked from one that has only imported the modules, and it ends as Python ends.
Commands that depend on how Python starts still start Python: see `needs_python`.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
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
                        [sys.executable, "-m", "tests.fork_process", str(theirs.fileno()), *self._preloaded],
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
