"""Tests of the deadlines of connections and downloads, without a server: a socket that gives byte by byte,
and a remote in memory."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from mlcbuild.canon import Entry
from mlcbuild.errors import RemoteError
from mlcbuild.remotes import deadlines
from mlcbuild.remotes.download import download
from mlcbuild.remotes.transport import Body, CancelledError, DamagedError


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the clock of the module `deadlines`, which limits the time of connections. Returns a list
    whose only value is the simulated time in seconds; a test changes it."""
    times = [100.0]
    monkeypatch.setattr("mlcbuild.remotes.deadlines.time.monotonic", lambda: times[0])
    return times


def begun(client: socket.socket) -> deadlines.TimedResponse:
    """Returns an HTTP response that will be read from the socket `client`, of which nothing has been read
    yet. Each phase, such as the headers or one read of the body, has 5 seconds."""
    client.settimeout(5.0)
    return deadlines.TimedResponse(client)


def test_headers_have_one_deadline_however_they_drip(
    pair: tuple[socket.socket, socket.socket], now: list[float]
) -> None:
    """Checks that neither interim responses (100 Continue) nor single bytes extend the deadline of 5 seconds
    for a response's headers. The test advances a simulated clock."""
    response = begun(pair[0])
    pair[1].sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + b"HTTP/1.1 200 OK\r\n")
    now[0] += 5.1
    with pytest.raises(TimeoutError):
        response.begin()
    response.close()


def test_each_read_of_a_body_has_a_deadline_of_its_own(
    pair: tuple[socket.socket, socket.socket], now: list[float]
) -> None:
    response = begun(pair[0])
    pair[1].sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nab")
    response.begin()
    for part in (b"", b"cd", b"ef"):
        pair[1].sendall(part)
        now[0] += 4.0
        assert response.read1(2) in (b"ab", b"cd", b"ef")
    response.close()


class Remote:
    """A simulated remote with one file, `data`. The first `breaks` downloads raise RemoteError after `step`
    bytes. If `ranges` is False, every download starts at the first byte."""

    def __init__(self, data: bytes, step: int = 1 << 20, breaks: int = 0, ranges: bool = True) -> None:
        self.data, self.step, self.breaks, self.ranges = data, step, breaks, ranges
        self.starts: list[int] = []

    def open(self, name: str, start: int = 0) -> Body | None:
        if not self.data:
            return None
        self.starts.append(start)
        begin = start if self.ranges else 0
        source, sent = io.BytesIO(self.data[begin:]), [0]

        def read() -> bytes:
            if self.breaks and sent[0] >= self.step:
                self.breaks -= 1
                raise RemoteError("the connection broke")
            part = source.read(self.step)
            sent[0] += len(part)
            return part

        return Body(begin, read, lambda: None)

    def size(self, name: str) -> int | None:
        return len(self.data)

    def put(self, name: str, source: object, size: int, *, new: bool = False) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


DATA = bytes(range(256)) * 8
ENTRY = Entry("a", blake3(DATA).hexdigest(), len(DATA))


def fetch(remote: Remote, part: Path, stop: threading.Event | None = None) -> tuple[bool, int]:
    """Downloads the test's blob from `remote` to the file `part`. Returns (True if the remote has the blob,
    number of bytes received). stop: event that ends the download early."""
    counts: list[int] = []
    complete = download(remote, ENTRY, part, stop or threading.Event(), counts.append)
    return complete, sum(counts)


def test_a_broken_download_continues_where_it_broke(tmp_path: Path) -> None:
    remote = Remote(DATA, step=512, breaks=2)
    assert fetch(remote, tmp_path / "p") == (True, len(DATA)) and remote.starts == [0, 512, 1024]
    assert (tmp_path / "p").read_bytes() == DATA


def test_a_server_that_ignores_ranges_sends_it_all_again(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(DATA[:700])
    remote = Remote(DATA, ranges=False)
    assert fetch(remote, tmp_path / "p") == (True, len(DATA)) and remote.starts == [700]


def test_parts_of_different_origins_are_downloaded_in_one_piece(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"\0" * 700)
    remote = Remote(DATA)
    assert fetch(remote, tmp_path / "p")[0] and remote.starts == [700, 0]
    assert (tmp_path / "p").read_bytes() == DATA


@pytest.mark.parametrize("data", [DATA[::-1], DATA + b"x", DATA[:-1]])
def test_wrong_bytes_are_refused_and_removed(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(DamagedError):
        fetch(Remote(data), tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_what_arrived_stays_when_a_download_is_cancelled(tmp_path: Path) -> None:
    stop = threading.Event()
    remote = Remote(DATA, step=512)
    counts: list[int] = []

    def count(size: int) -> None:
        counts.append(size)
        stop.set()

    with pytest.raises(CancelledError):
        download(remote, ENTRY, tmp_path / "p", stop, count)
    assert counts == [512] and (tmp_path / "p").read_bytes() == DATA[:512]
    assert fetch(Remote(b""), tmp_path / "q") == (False, 0) and not (tmp_path / "q").exists()


def test_a_link_of_another_account_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / "p").symlink_to(tmp_path / "victim")
    assert fetch(Remote(DATA), tmp_path / "p")[0]
    assert (tmp_path / "victim").read_bytes() == b"mine" and not (tmp_path / "p").is_symlink()
