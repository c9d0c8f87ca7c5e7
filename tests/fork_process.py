"""The process of a fork server for tests: it imports modules, and then forks a process for each command that
`tests/forkserver.py` requests."""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module


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
