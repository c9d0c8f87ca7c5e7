"""Downloads a blob from a remote cache into a file, resuming an earlier attempt and hashing the bytes as they
arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import TracebackType

from blake3 import blake3

from mlcbuild.canon import Entry
from mlcbuild.errors import RemoteError
from mlcbuild.remotes.transport import CHUNK, Attempts, Buffer, CancelledError, DamagedError, Transport
from mlcbuild.store import layout
from mlcbuild.store.staging import remove


def download(
    transport: Transport,
    entry: Entry,
    part: Path,
    stop: threading.Event,
    on_bytes: Callable[[int], None],
) -> bool:
    """Completes a partial download of a blob in the file `part`, which it creates if it is missing, verifies
    it, and returns True. Returns False if the remote cache does not have the blob.

    If bytes of an earlier attempt or of several requests result in a wrong digest, the blob is downloaded
    once more as a whole. entry: digest and size of the blob; stop: event that cancels the download; on_bytes:
    called with the number of new bytes. Raises DamagedError if the content or size is wrong, after which
    `part` is gone, or if the remote has no readable object under this name. RemoteError (several requests in
    a row brought too few bytes, or one was too slow) and CancelledError leave the downloaded bytes in `part`.
    Raises OSError when `part` cannot be written.
    """
    name = f"cas/{entry.digest}"
    with _Part(part, entry.size) as target:
        # Bytes of different requests may have different origins, so the blob is downloaded once more then.
        for is_mixed in (target.have > 0, False):
            if not _complete(transport, name, target, stop, on_bytes):
                return False
            if target.hexdigest() == entry.digest:
                return True
            if not is_mixed and target.requests < 2:
                break
            target.restart()
    part.unlink(missing_ok=True)
    raise DamagedError("its content does not match its digest")


def _complete(
    transport: Transport, name: str, target: _Part, stop: threading.Event, on_bytes: Callable[[int], None]
) -> bool:
    """Requests the rest of a remote object until the file `target` has all of its bytes, and returns True;
    returns False if the remote cache does not have the object. The digest is not checked. Sets
    `target.requests` to the number of requests that were answered. name: the object's, such as
    "cas/<digest>"; stop: event that cancels the download; on_bytes: called with the number of new bytes.
    Raises DamagedError if the object has another size, RemoteError if several requests in a row bring too few
    bytes or one is too slow, CancelledError if `stop` is set, OSError if the file cannot be written."""
    target.requests, attempts = 0, Attempts()
    while target.have < target.size:
        before, began = target.have, time.monotonic()
        try:
            if not _request(transport, name, target, stop, on_bytes):
                return False
        except RemoteError as error:
            if stop.is_set():
                raise CancelledError from None
            attempts.failed(error, target.have - before, began)
    return True


def _request(
    transport: Transport, name: str, target: _Part, stop: threading.Event, on_bytes: Callable[[int], None]
) -> bool:
    body = transport.open(name, target.have)
    if body is None:
        return False
    with body:
        target.requests += 1
        if body.start != target.have:
            target.restart()
        while data := body.read():
            if stop.is_set():
                raise CancelledError
            target.add(data)
            on_bytes(len(data))
    if target.have != target.size:
        target.discard()
        raise DamagedError(f"it has {target.have} bytes where {target.size} should be")
    return True


class _Part:
    """A file that a download fills, with the digest of the bytes that it has so far. Creating the object
    hashes the bytes of an earlier attempt, or drops them if they are too many."""

    def __init__(self, path: Path, size: int) -> None:
        self.size = size
        self.have = 0
        self.requests = 0
        self._path = path
        self._hasher = blake3()
        if not path.is_file() or path.is_symlink():
            remove(path)  # It is damaged, or a link that another account created.
        self._file = FileIO(layout.open_or_create(path), "r+")  # closed by the context
        while data := self._file.read(CHUNK):
            self._hasher.update(data)
            self.have += len(data)
        if self.have > size:
            self.restart()

    def add(self, data: Buffer) -> None:
        """Appends downloaded bytes to the file that is being downloaded, and updates the file's digest.
        Raises DamagedError, and discards the file, if it gets more bytes than it should have.
        """
        left = memoryview(data)[: max(0, self.size - self.have)]
        self._hasher.update(left)
        while left:
            left = left[self._file.write(left) :]
        self.have += len(data)
        if self.have > self.size:
            self.discard()
            raise DamagedError(f"it has more than the {self.size} bytes that it should have")

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hasher = blake3()
        self.have = 0

    def discard(self) -> None:
        self._path.unlink(missing_ok=True)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()

    def __enter__(self) -> _Part:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self.size and not self.have:  # leaves nothing that a later attempt could resume
            self.discard()
