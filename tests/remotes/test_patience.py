"""A remote can slow a run by its timeout, and can do nothing else: servers and directories that never end.

Each server here would keep a client for ever if any wait had no end. A run completes, with one warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import client
from mlcbuild.remotes.background import within
from mlcbuild.remotes.kinds import connect
from mlcbuild.remotes.transport import SLOWEST, Attempts, Pace, SlowError
from tests.caches import Cache, Handler, serving
from tests.remotes.users import BIG, BUILT, REUSED, User, statuses

TIMEOUT = 0.6
"""Timeout of the remotes in seconds: the drops below come more often, so that no single read takes so
long."""
DROP = 0.05
LONG = 60
"""Seconds that no test takes, on however busy a machine, unless something waits without end."""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.01, 0.02))
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(params=["http", "s3", "oci"])
def address(request: pytest.FixtureRequest) -> Callable[[Cache], str]:
    if request.param == "oci":
        return lambda cache: f"oci://{cache.url[7:]}/r"
    return url_of(request)


@pytest.fixture(params=["http", "s3"])
def plain_address(request: pytest.FixtureRequest) -> Callable[[Cache], str]:
    return url_of(request)


def url_of(request: pytest.FixtureRequest) -> Callable[[Cache], str]:
    if request.param == "http":
        return lambda cache: cache.url
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'mlcbuild[s3]'")
    request.getfixturevalue("s3_login")
    return lambda cache: cache.bucket


class Endless:
    """Sends the beginning of an answer, and then the rest again and again, until the test ends."""

    def __init__(self, begin: bytes, rest: bytes, pause: float = DROP) -> None:
        self.begin, self.rest, self.pause = begin, rest, pause
        self.over = threading.Event()

    def __call__(self, handler: Handler) -> bool:
        handler.close_connection = True
        handler.wfile.write(self.begin)
        while not self.over.wait(self.pause) if self.pause else not self.over.is_set():
            handler.wfile.write(self.rest)
        return True


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS: dict[str, tuple[bytes, bytes, float]] = {
    "silence": (b"", b"", DROP),
    "status line": (b"H", b"T", DROP),
    "header": (OK + b"X: ", b"a", DROP),
    "headers": (OK, b"X: a\r\n", DROP),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", DROP),
    "fast continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0),
    "body": (OK + b"Content-Length: 3000000\r\n\r\n", b"x", DROP),
    "body without length": (OK + b"\r\n", b"x", DROP),
    "chunk size": (CHUNKED + b"1", b"0", DROP),
    "chunk extension": (CHUNKED + b"1;", b"a", DROP),
    "trailers": (CHUNKED + b"0\r\n", b"X: a\r\n", DROP),
    "fast trailers": (CHUNKED + b"0\r\n", b"X: a\r\n" * 1000, 0),
    "one byte": (OK + b"Content-Length: 3000000\r\n\r\nx", b"", DROP),
}


@contextmanager
def endless(name: str) -> Iterator[tuple[Cache, Endless]]:
    fault = Endless(*ENDLESS[name])
    with serving(fault) as cache:
        try:
            yield cache, fault
        finally:
            fault.over.set()


def test_every_phase_of_an_answer_ends(address: Callable[[Cache], str], tmp_path: Path) -> None:
    for number, name in enumerate(ENDLESS):
        with endless(name) as (cache, _):
            user = User(tmp_path / str(number), address(cache))
            user.timeout = TIMEOUT
            began = time.monotonic()
            result = user.run()
            assert time.monotonic() - began < LONG, name
            assert statuses(result) == BUILT, name
            (warning,) = user.warnings()
            assert warning.startswith(f"{address(cache)} is not used in this run: it "), (name, warning)


@pytest.mark.parametrize("name", ["header", "continue", "chunk size", "trailers", "one byte"])
def test_every_phase_of_a_blob_ends(name: str, plain_address: Callable[[Cache], str], tmp_path: Path) -> None:
    address = plain_address
    with serving() as cache:
        User(tmp_path / "one", address(cache)).run(BIG)
        drip = Endless(*ENDLESS[name])
        cache.fault = lambda handler: "/cas/" in handler.path and handler.command == "GET" and drip(handler)
        second = User(tmp_path / "two", address(cache))
        second.timeout = TIMEOUT
        try:
            assert statuses(second.run(BIG)) == {"big": "built"}
        finally:
            drip.over.set()
        (warning,) = second.warnings()
        assert warning.startswith(f"{address(cache)} is not used in this run: it ")


def test_a_server_that_breaks_off_after_each_byte_is_given_up(tmp_path: Path) -> None:
    """Three million requests for a blob of three million bytes would each have brought something."""
    with serving() as cache:
        User(tmp_path / "one", cache.url).run(BIG)
        asked = []

        def fault(handler: Handler) -> bool:
            if "/cas/" not in handler.path or handler.command != "GET":
                return False
            time.sleep(0.01)
            start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
            data = handler.cache.content[handler.path][start:]
            extra = {"Content-Range": f"bytes {start}-2999999/3000000"}
            handler.answer(206 if start else 200, data[:1], extra, len(data))
            asked.append(start)
            return True

        cache.fault = fault
        second = User(tmp_path / "two", cache.url)
        assert statuses(second.run(BIG)) == {"big": "built"}
        (warning,) = second.warnings()
        assert "its answer ended early" in warning and asked == [0, 1, 2]


def test_pace_is_measured_in_windows_and_attempts_by_what_they_bring() -> None:
    pace = Pace(0.2)
    pace.add(10 * SLOWEST)
    time.sleep(0.25)
    pace.add(0)
    time.sleep(0.25)
    with pytest.raises(SlowError, match="it is too slow: 1 bytes in 0 seconds"):
        pace.add(1)
    attempts, error = Attempts(), RemoteError("broken off")
    for count in (0, 0, 1_000_000, 0, 0):
        attempts.failed(error, count, time.monotonic())
    with pytest.raises(RemoteError, match="broken off"):
        attempts.failed(error, 0, time.monotonic())
    with pytest.raises(SlowError):
        Attempts().failed(SlowError("slow"), 1_000_000, time.monotonic())


def test_a_request_is_not_repeated_after_its_time(tmp_path: Path) -> None:
    """Three answers that each come just in time would take three times the timeout."""

    def busy(handler: Handler) -> bool:
        time.sleep(0.5 * TIMEOUT)
        handler.answer(503)
        return True

    with serving(busy) as cache:
        user = User(tmp_path / "one", cache.url, mode="read")
        user.timeout = 0.4 * TIMEOUT + 0.2
        assert statuses(user.run()) == BUILT
        assert len({path for _, path in cache.requests}) == 1 and len(cache.requests) <= 3


@contextmanager
def mute() -> Iterator[str]:
    """Yields the address of a listener that accepts connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def full_backlog() -> Iterator[str]:
    """Yields the address of a listener that takes no connection: further ones are neither made nor
    refused."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        for one in waiting:
            one.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("server", [mute, full_backlog])
def test_connecting_ends(server: Callable[[], object], scheme: str, tmp_path: Path) -> None:
    with server() as place:  # type: ignore[attr-defined]
        user = User(tmp_path / "one", f"{scheme}://{place}")
        user.timeout = TIMEOUT
        assert statuses(user.run()) == BUILT
        (warning,) = user.warnings()
        assert warning == f"{scheme}://{place} is not used in this run: it does not answer"


def test_a_name_that_is_looked_up_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup itself cannot be made to hang here without a name server: it is replaced."""
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: over.wait(LONG) and [])
    user = User(tmp_path / "one", "http://somewhere.example")
    user.timeout = TIMEOUT
    try:
        assert statuses(user.run()) == BUILT
    finally:
        over.set()
    (warning,) = user.warnings()
    assert warning.endswith("is not used in this run: it does not answer")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_stalls(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tunnel's answer comes drop by drop, as do those that the proxy passes on."""
    with endless("header") as (cache, inputs):

        def tunnel(handler: Handler) -> None:
            inputs(handler)

        monkeypatch.setattr(Handler, "do_CONNECT", tunnel, raising=False)
        monkeypatch.setenv(f"{scheme}_proxy", cache.url)
        user = User(tmp_path / "one", f"{scheme}://somewhere.example")
        user.timeout = TIMEOUT
        assert statuses(user.run()) == BUILT
        (warning,) = user.warnings()
        assert "it does not answer" in warning
        assert scheme == "http" or "the proxy 127.0.0.1: it does not answer" in warning


def test_redirects_in_a_circle_and_slow_ones_end(tmp_path: Path) -> None:
    for number, pause in enumerate((0.0, 0.3 * TIMEOUT)):

        def circle(handler: Handler, pause: float = pause, number: int = number) -> bool:
            if "/blobs/" in handler.path:
                time.sleep(pause)
                handler.answer(307, extra={"Location": f"{handler.path.partition('?')[0]}?{number}"})
                return True
            layer = {"mediaType": "x", "digest": "sha256:" + "0" * 64, "size": 9}
            handler.answer(200, b'{"layers": [%s]}' % str(layer).replace("'", '"').encode())
            return True

        with serving(circle) as cache:
            user = User(tmp_path / str(number), f"oci://{cache.url[7:]}/r")
            user.timeout = TIMEOUT
            assert statuses(user.run()) == BUILT
            (warning,) = user.warnings()
            assert "it redirects clients (status 307)" in warning or "it does not answer" in warning


# Directories


def odd(kind: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "loop":
            path.symlink_to(path.name)
        else:
            # The whole path is longer than addresses may be.
            with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
                listener.bind(path.name)

    return make


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "loop", "socket"])
@pytest.mark.parametrize("part", ["ac", "cas"])
def test_only_regular_files_are_read(part: str, kind: str, tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    User(tmp_path / "one", root.as_uri()).run()
    for path in (root / part).iterdir():
        odd(kind)(path)
    user = User(tmp_path / "two", root.as_uri(), mode="read")
    user.timeout = TIMEOUT * 10
    result = user.run()
    assert result.ok and user.text(result, "c") == "C\nB\nA" and statuses(result)["c"] == "built"
    assert all(warning.startswith(root.as_uri()) for warning in user.warnings())
    words = "it is not a regular file" if kind in ("fifo", "directory", "device") else "it cannot be read"
    assert words in user.warnings()[0]


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "loop", "socket"])
@pytest.mark.parametrize("shelf", ["known", "partial"])
def test_files_of_the_own_store_are_regular_too(shelf: str, kind: str, tmp_path: Path) -> None:
    """Records and blobs of remotes lie in a store that others may write to."""
    root = tmp_path / "shared"
    root.mkdir()
    record = next(r.record for r in User(tmp_path / "one", root.as_uri()).run().steps if r.name == "c")
    assert record is not None
    user = User(tmp_path / "two", root.as_uri(), mode="read")
    place = (
        user.store.root
        / shelf
        / (f"{record.key[:2]}/{record.key}" if shelf == "known" else record.rows[0][1])
    )
    place.parent.mkdir(parents=True)
    place.touch()
    odd(kind)(place)
    result = user.run()
    assert result.ok and user.text(result, "c") == "C\nB\nA" and statuses(result) == REUSED
    assert not user.warnings()


def test_what_arrives_is_not_written_through_a_link(tmp_path: Path) -> None:
    root, mine = tmp_path / "shared", tmp_path / "mine"
    root.mkdir()
    record = next(r.record for r in User(tmp_path / "one", root.as_uri()).run().steps if r.name == "c")
    assert record is not None
    mine.write_text("of somebody else")
    user = User(tmp_path / "two", root.as_uri(), mode="read")
    (user.store.root / "partial").mkdir(parents=True)
    (user.store.root / "partial" / record.rows[0][1]).symlink_to(mine)
    assert statuses(user.run()) == REUSED
    assert mine.read_text() == "of somebody else"


def test_a_writer_replaces_what_is_no_file(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    User(tmp_path / "one", root.as_uri()).run()
    for path in [*(root / "cas").iterdir()]:
        odd("fifo")(path)
    assert User(tmp_path / "two", root.as_uri()).run().ok
    assert statuses(User(tmp_path / "three", root.as_uri()).run()) == REUSED


def test_only_unfinished_uploads_are_swept(tmp_path: Path) -> None:
    """Somebody with write access to the remote may have put a link in place of its `tmp`."""
    root, mine = tmp_path / "shared", tmp_path / "mine"
    root.mkdir()
    mine.mkdir()
    (root / "tmp").symlink_to(mine)
    for name in ("letter.txt", "0" * 31, "0" * 32):
        (mine / name).write_text("of yesterday's yesterday")
        os.utime(mine / name, (1e9, 1e9))
    assert User(tmp_path / "one", root.as_uri()).run().ok
    assert sorted(path.name for path in mine.iterdir()) == ["0" * 31, "letter.txt"]


@contextmanager
def dead_mount(place: Path) -> Iterator[None]:
    """Yields a file system whose server never answers: FUSE, of which nobody reads the requests."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("/dev/fuse cannot be opened")
    options = f"fd={descriptor},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    try:
        if libc.mount(b"dead", os.fsencode(place), b"fuse", 0, options):
            pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.umount2(os.fsencode(place), 2)  # MNT_DETACH
    finally:
        os.close(descriptor)  # ends what waits for it


def test_a_directory_whose_server_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    with dead_mount(root):
        user = User(tmp_path / "one", (root / "cache").as_uri())
        user.timeout = TIMEOUT
        assert statuses(user.run()) == BUILT
        (warning,) = user.warnings()
        assert warning.endswith("is not used in this run: it does not answer")


# Interrupts

STALLS = ("silence", "header", "fast continue", "one byte")


def interrupted(store: Path, url: str, until: Callable[[], object], note: Path) -> float:
    """Interrupts a run that waits for a remote with SIGINT, and returns the seconds until it has ended."""
    return ended(until, "-m", "tests.builder", store, "chain", note, "pool", url)


def ended(until: Callable[[], object], *arguments: str | Path) -> float:
    """Returns seconds from Ctrl-C, soon after `until` is true, to the end of Python with these arguments."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MLCBUILD_TEST_TIMEOUT": "900"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + LONG
        while not until():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.3)
        assert process.poll() is None, "it waits"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(LONG)
        return time.monotonic() - began
    finally:
        process.kill()
        process.wait()


PULL = (
    "import sys; from mlcbuild.remotes import transport; transport.TIMEOUT = 900.0;"
    "from mlcbuild.cli import main; sys.exit(main(['pull', *sys.argv[1:]]))"
)
"""A program that pulls with a timeout of 900 seconds, so that only an interrupt ends it within LONG."""


@pytest.mark.parametrize("name", STALLS)
def test_ctrl_c_ends_a_run_that_asks_a_remote(name: str, tmp_path: Path) -> None:
    with endless(name) as (cache, _):
        assert interrupted(tmp_path / "s", cache.url, lambda: cache.requests, tmp_path / "note") < LONG


def test_ctrl_c_ends_a_run_that_asks_in_its_loop(tmp_path: Path) -> None:
    """Keys of later layers are known once earlier steps are built: then a signal only sets a flag."""
    drip = Endless(*ENDLESS["silence"])
    names: set[str] = set()

    def fault(handler: Handler) -> bool:
        names.add(handler.path)
        return drip(handler) if len(names) > 4 and handler.command == "GET" else False

    with serving(fault) as cache:
        until = lambda: len(names) > 4  # noqa: E731
        try:
            assert interrupted(tmp_path / "s", cache.url, until, tmp_path / "note") < LONG
        finally:
            drip.over.set()


def test_ctrl_c_ends_a_download(tmp_path: Path) -> None:
    with serving() as cache:
        url, note = cache.url, tmp_path / "note"
        build = [sys.executable, "-m", "tests.builder", str(tmp_path / "1"), "chain", str(note), "pool", url]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(build, env=environment, check=True, capture_output=True, timeout=LONG)
        (last,) = [name for name in cache.names("ac") if b'"text":"2/0"' in cache.content[name]]
        del cache.content[last]  # a step that runs, and needs files
        drip, asked = Endless(*ENDLESS["header"]), threading.Event()

        def fault(handler: Handler) -> bool:
            if handler.command != "GET" or "/cas/" not in handler.path:
                return False
            asked.set()
            return drip(handler)

        cache.fault = fault
        try:
            assert interrupted(tmp_path / "2", url, asked.is_set, note) < LONG
        finally:
            drip.over.set()


@pytest.mark.parametrize("name", STALLS)
def test_ctrl_c_ends_a_pull(name: str, tmp_path: Path) -> None:
    """The manifest comes at once; four layers are on their way."""
    drip = Endless(*ENDLESS[name])
    title = "org.opencontainers.image.title"
    layers = [
        {"digest": f"sha256:{n:064x}", "size": 3_000_000, "annotations": {title: file}}
        for n, file in enumerate(("bundle.json", "a", "b", "c", "d"))
    ]

    def fault(handler: Handler) -> bool:
        if "/blobs/" in handler.path:
            return drip(handler)
        handler.answer(200, json.dumps({"layers": layers}).encode())
        return True

    with serving(fault) as cache:
        try:
            url, out = f"oci://{cache.url[7:]}/r:v1", tmp_path / "out"
            assert ended(lambda: len(cache.requests) > 4, "-c", PULL, url, out) < LONG
        finally:
            drip.over.set()


@pytest.mark.parametrize("server", [mute, full_backlog])
def test_ctrl_c_ends_a_run_that_connects(server: Callable[[], object], tmp_path: Path) -> None:
    with server() as place:  # type: ignore[attr-defined]
        began = time.monotonic()
        passed = lambda: time.monotonic() - began > 3  # noqa: E731
        assert interrupted(tmp_path / "s", f"https://{place}", passed, tmp_path / "note") < LONG


def test_ctrl_c_ends_a_run_that_waits_for_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    with dead_mount(root):
        began = time.monotonic()
        passed = lambda: time.monotonic() - began > 3  # noqa: E731
        url = (root / "cache").as_uri()
        assert interrupted(tmp_path / "s", url, passed, tmp_path / "note") < LONG


def test_closing_wakes_who_waits() -> None:
    with endless("silence") as (cache, _):
        transport = connect(cache.url, 10 * LONG)  # more than a test may take
        threading.Timer(0.2, transport.close).start()
        with pytest.raises(RemoteError, match="the run ends"):
            transport.size("cas/x")


def test_a_call_without_a_timeout_of_its_own_is_left_alone() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, over.wait)
    over.set()
    assert within(LONG, lambda: 7).result() == 7
    with pytest.raises(ValueError, match="no"):
        within(LONG, lambda: int("no")).result()
