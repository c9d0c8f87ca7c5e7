"""Runs work that may never end in child processes, which can be killed. A process reads one JSON document per
line and writes one line with the answer to each.

A child starts when it is first needed, and again after it had to be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from mlcbuild_format.errors import RequestError, SetupError, StoppingError
from mlcbuild_format.fields import Json

_PROGRAM = """
import os
from {module} import work
try:
    work()
except BrokenPipeError:
    os._exit(0)
"""
"""The Python program of a child process, which calls the function `work` of a module. If the child writes an
answer after its server has ended, it exits at once and silently: an ordinary exit would flush the output
again, and print a traceback on the terminal of a chat that has ended."""


_ENDED = (ProcessLookupError, PermissionError)
"""Errors of the system for a signal to a process group that has ended: macOS reports PermissionError while
nobody has waited for its processes."""


class EndedError(Exception):
    """The error for a child process that has ended without an answer, or was killed because it
    took too long, while its server goes on."""

    def __init__(self, code: int | None) -> None:
        """Creates the error for a child process that gave no answer. code: exit code of the process, negative
        for a signal; None if the process was killed after its time limit."""
        super().__init__(code)
        self.code = code


class StartingError(RequestError):
    """The error for a request whose child process has not become ready: the machine is busy or lacks memory,
    and the request is not to blame. A later one may be served."""

    def __init__(self, purpose: str, code: int | None) -> None:
        """Creates the error for a child process that was not ready in time or has ended before. purpose: what
        the process does, as a verb such as "renders chat templates"; code: exit code of the process, negative
        for a signal; None if it was killed after its time limit."""
        reason = f"was not ready within {STARTING:g} s" if code is None else f"ended with code {code}"
        super().__init__(
            f"the process that {purpose} {reason} when it started: try again later",
            code="overloaded",
            status=503,
        )


class Child:
    """A child process that answers JSON documents, one per line, with the function `work` of a module. One
    thread at a time may use it; any thread may close it."""

    def __init__(self, module: str, purpose: str, hello: Callable[[], object] | None = None) -> None:
        """Creates the child process, which starts at its first use. module: module with the function `work`
        that it runs; purpose: what the process does, as a verb such as "renders chat templates", for error
        messages; hello: function that returns the JSON document to send first to each new process, whose
        answer means that the process is ready; None for none."""
        self._module, self._purpose, self._hello = module, purpose, hello
        self.process: subprocess.Popen[bytes] | None = None
        self._kill: Callable[[], object] = lambda: None
        self._closed = False

    def ask(self, document: object, patience: float) -> Json:
        """Sends a JSON document to the child process and returns its answer. Raises EndedError if there is
        none within `patience` seconds or the process ends, StartingError if a new process does not become
        ready, StoppingError once the method `close` was called, and SetupError if no process can be started
        or it ends with exit code 1. After an error the process is killed; the next call starts another
        one."""
        return self.ask_line(as_line(document), patience)

    def ask_line(self, line: bytes, patience: float) -> Json:
        """Sends a JSON document, as one line with its line feed, to the child process and returns its answer,
        parsed. Raises EndedError if there is none within `patience` seconds or the process ends,
        StartingError if a new process does not become ready, StoppingError once the method `close` was
        called, and SetupError if no process can be started or it ends with exit code 1. After an error the
        process is killed; the next call starts another one."""
        process = self._running()
        try:
            answer: Json = json.loads(self._exchange(process, line, patience))
        except BaseException as error:  # The next request would receive an answer that nobody has read.
            self.end()
            if isinstance(error, EndedError) and self._closed:
                raise StoppingError from None
            if isinstance(error, EndedError) and error.code == 1:
                raise SetupError(
                    f"the process that {self._purpose} has failed: see the lines above"
                ) from None
            raise
        return answer

    def end(self) -> None:
        """Kills the child process that answers requests (JSON texts); the next request starts another one."""
        self._kill()
        self.process = None

    def close(self) -> None:
        """Kills the process and starts no other one. A thread that waits for an answer gets StoppingError.
        Any thread may call it.
        """
        self._closed, process = True, self.process
        if process is not None and process.poll() is None:
            with contextlib.suppress(*_ENDED):
                os.killpg(process.pid, signal.SIGKILL)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise StoppingError
        if self.process is None or self.process.poll() is not None:
            self._kill()
            self.process = self._started()
            # Runs when this object is garbage collected, and when the interpreter ends.
            self._kill = weakref.finalize(self, _kill, self.process)
            if self._closed:  # It was closed meanwhile.
                self._kill()
                raise StoppingError
            if self._hello is not None:
                try:
                    self.ask(self._hello(), STARTING)
                except EndedError as error:
                    raise StartingError(self._purpose, error.code) from None
        return self.process

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(module=self._module)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C reaches only the server.
            )
        except OSError as error:
            raise SetupError(f"the process that {self._purpose} cannot start: {error}") from None

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], line: bytes, patience: float) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        end, parts = time.monotonic() + patience, list[bytes]()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise EndedError(None)
                parts.append(os.read(process.stdout.fileno(), 1 << 20))
                if not parts[-1]:
                    raise EndedError(process.wait(patience))
        return b"".join(parts)


def as_line(document: object) -> bytes:
    """Returns a JSON document as one line of bytes with its line feed, the form in which a child process
    reads it."""
    return json.dumps(document).encode() + b"\n"


STARTING = 60.0
"""Seconds that a child process may take to start, on a machine that is busy with other work."""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a child process and its forks, and closes its pipes."""
    with contextlib.suppress(*_ENDED):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def limit_memory(more: int) -> None:
    """Disables core dumps of this process, and limits its address space to `more` bytes above the present
    size. macOS lacks such a limit: there, only time and text sizes are limited."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        present_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = present_bytes + more if most == resource.RLIM_INFINITY else min(present_bytes + more, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
