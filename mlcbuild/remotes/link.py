"""The connection to one remote cache during one run: reports its failure once and stops using it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from mlcbuild.canon import Entry
from mlcbuild.errors import RemoteError
from mlcbuild.keyfile import Signer
from mlcbuild.remotes import Remote
from mlcbuild.remotes.download import download
from mlcbuild.remotes.kinds import connect
from mlcbuild.remotes.signing import RefusedError, seal, unseal
from mlcbuild.remotes.transport import TIMEOUT, CancelledError, DamagedError, Pace, Transport
from mlcbuild.store.blobs import has_bytes
from mlcbuild.store.records import LARGEST, Record
from mlcbuild.store.store import Store

_MAX_DAMAGED = 3
"""Number of damaged objects after which a remote cache is no longer read in this run."""
_UPLOADS_CONTINUE = "; uploads to it continue and replace damaged files"
"""End of the warning that a remote cache is no longer read, if the run writes to it, too."""


class SpoiltError(Exception):
    """The error for a file of this machine that is damaged, or cannot be read, and so is not uploaded. The
    message names the file.
    """


@dataclass
class UploadCount:
    """The numbers of step records, and of bytes of files without the records, that were uploaded to a remote
    cache."""

    records: int = 0
    bytes: int = 0


class Link:
    """The connection to one remote cache, and the remote's state in this run. Thread-safe.

    No public method raises RemoteError: failures set `unread` or `unwritten` and add a warning.
    """

    def __init__(self, remote: Remote, signer: Signer | None = None, timeout: float = TIMEOUT) -> None:
        self.remote = remote
        self.name = remote.url
        self.unread = "" if remote.reads else "it is not read from"
        """The reason why the remote is not read in this run; "" if it is read."""
        self.unwritten = "" if remote.writes() else "it is not written to"
        """The reason why nothing is written to the remote in this run; "" if it is written to."""
        self.sent = UploadCount()
        """The numbers of step records, and of bytes of files without the records, that were uploaded to the
        remote in this run."""
        self._signer = signer
        self._timeout = timeout
        self._guard = threading.Lock()
        self._warnings: list[str] = []
        self._damaged: set[str] = set()
        """Names (ac/<key> or cas/<digest>) of the remote's objects that were refused in this run: damaged
        ones, and records without a trusted signature. Uploads replace them. After three, the remote is no
        longer read, and uploads replace every blob, not only these."""
        self._transport: Transport | None = None
        if self.unread and self.unwritten:
            return
        try:
            self._transport = connect(remote.url, timeout)
        except RemoteError as error:
            self.unread = self.unwritten = str(error)
            self._warnings.append(f"{self.name} is not used in this run: {error}")

    def record(self, key: str) -> Record | None:
        """Downloads and checks the step record of a key; returns None if the remote cache has no valid one,
        or is not read in this run. A refused record, and a request that fails, add a warning; after the
        latter the remote is not used again in this run, and after three objects with wrong contents it is not
        read."""
        name = f"ac/{key}"
        if self.unread:
            return None
        try:
            data = self._small(name)
            return None if data is None else unseal(key, data, self.remote.trust)
        except RemoteError as error:
            self._fail(error, writing=False)
        except (RefusedError, DamagedError) as error:
            self._refuse(name, f"the record {key}", str(error))
        return None

    def blob(self, entry: Entry, part: Path, stop: threading.Event, on_bytes: Callable[[int], None]) -> bool:
        """Downloads a blob of the remote cache into the file `part`, verifies it and returns True. Returns
        False if the remote does not have it or is not read in this run, and, with a warning, if the bytes are
        wrong or the download fails; after a failure the remote is not used again in this run, and after three
        objects with wrong contents it is not read. stop: event that cancels the download; on_bytes: called
        with the number of new bytes. Raises CancelledError if `stop` is set, OSError if the file cannot be
        written."""
        if self.unread:
            return False
        try:
            return download(self._open(), entry, part, stop, on_bytes)
        except RemoteError as error:
            if not stop.is_set():
                self._fail(error, writing=False)
        except DamagedError as error:
            self._refuse(f"cas/{entry.digest}", f"{entry.path} (blob {entry.digest})", str(error))
        return False

    def send(self, record: Record, store: Store, stop: threading.Event) -> bool:
        """Uploads a step record and its blobs, the record last, and returns True if the remote cache has all
        of them afterwards. Returns False if the remote is not written to in this run, and, with a warning, if
        a file here is damaged or the upload fails. Only a failed upload ends all writing to the remote in
        this run.

        Objects that the remote has are not sent again, unless they were damaged; but a signed record replaces
        the same one without a signature. After three damaged objects in this run, all blobs, and the records
        that prove to be wrong, are sent again. stop: event that cancels the upload. Raises CancelledError if
        `stop` is set."""
        if self.unwritten:
            return False
        try:
            for digest, size in {row[1]: row[2] for row in record.rows}.items():
                self._send_blob(digest, store.blob(digest), size, stop)
            self._send_record(record)
        except SpoiltError as error:
            return self._withhold(error)
        except RemoteError as error:
            return self._unsent(error, stop)
        return True

    def offer(self, entry: Entry, place: Path, stop: threading.Event) -> bool:
        """Uploads the file `place` to the remote cache as a blob, and returns True if the remote has the blob
        afterwards. Returns False if the remote is not written to in this run, and, with a warning, if the
        file has other bytes or the upload fails. Only a failed upload ends all writing to the remote in this
        run. entry: digest and size of the blob. Raises CancelledError if `stop` is set."""
        if self.unwritten:
            return False
        try:
            self._send_blob(entry.digest, place, entry.size, stop)
        except SpoiltError as error:
            return self._withhold(error)
        except RemoteError as error:
            return self._unsent(error, stop)
        return True

    def _withhold(self, error: SpoiltError) -> bool:
        with self._guard:
            self._warnings.append(f"{error}; run `mlcbuild cache verify`")
        return False

    def _unsent(self, error: RemoteError, stop: threading.Event) -> bool:
        if stop.is_set():
            raise CancelledError from None
        self._fail(error, writing=True)
        return False

    def take_warnings(self) -> list[str]:
        with self._guard:
            warnings, self._warnings = self._warnings, []
        return warnings

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _open(self) -> Transport:
        assert self._transport is not None  # Otherwise `unread` and `unwritten` contain the reason.
        return self._transport

    def _small(self, name: str) -> bytes | None:
        body = self._open().open(name)
        if body is None:
            return None
        data = bytearray()
        with body:
            while piece := body.read():
                data += piece
                if len(data) > LARGEST:
                    raise RefusedError(f"it has more than {LARGEST} bytes")
        return bytes(data)

    def _send_blob(self, digest: str, path: Path, size: int, stop: threading.Event) -> None:
        name = f"cas/{digest}"
        if stop.is_set():
            raise CancelledError
        remote_size = self._size(name)
        if remote_size == size and not self._is_suspect():
            return
        try:
            if not has_bytes(path, digest, size):
                raise SpoiltError(f"{path} is not sent: its content has changed since it was written")
            with path.open("rb") as file:
                source = _Watched(file, stop, self._timeout)
                self._open().put(name, cast(BinaryIO, source), size, new=remote_size is None)
                with self._guard:
                    self.sent.bytes += size
        except OSError as error:
            raise SpoiltError(f"{path} is not sent: {error.strerror or error}") from None

    def _send_record(self, record: Record) -> None:
        import io

        name = f"ac/{record.key}"
        remote_size = self._size(name)
        # A record of exactly this size is the same one without a signature.
        is_unsigned = self._signer is not None and remote_size == len(record.encode())
        if (
            remote_size is not None
            and remote_size >= 0
            and not is_unsigned
            and not (self._is_suspect() and self._is_wrong(record.key))
        ):
            return
        data = seal(record, self._signer)
        self._open().put(name, io.BytesIO(data), len(data), new=remote_size is None)
        with self._guard:
            self.sent.records += 1

    def _size(self, name: str) -> int | None:
        """Returns the size in bytes of an object on the remote cache; None if it does not exist or has no
        stated size; -1 if this request, or an earlier download in this run, shows that it is damaged and must
        be replaced. Raises RemoteError if the request fails."""
        try:
            return -1 if name in self._damaged else self._open().size(name)
        except DamagedError:
            return -1

    def _is_suspect(self) -> bool:
        """Returns True if at least three objects of the remote cache proved to be damaged in this run, so
        that a blob of the right size cannot be trusted."""
        return len(self._damaged) >= _MAX_DAMAGED

    def _is_wrong(self, key: str) -> bool:
        """Downloads the record (description of a step's result) that a remote cache has under a key, and
        returns True if it is missing or damaged. No signature is required. Raises RemoteError if the download
        fails."""
        try:
            data = self._small(f"ac/{key}")
            if data is not None:
                unseal(key, data)
        except (RefusedError, DamagedError):
            return True
        return data is None

    def _refuse(self, name: str, subject: str, why: str) -> None:
        with self._guard:
            self._damaged.add(name)
            self._warnings.append(f"{self.name}: {subject} is refused: {why}")
            if len(self._damaged) == _MAX_DAMAGED and not self.unread:
                self.unread = "it holds damaged files"
                # Uploads replace damaged objects with good ones.
                uploads = "" if self.unwritten else _UPLOADS_CONTINUE
                self._warnings.append(f"{self.name} is not read again in this run: {self.unread}{uploads}")

    def _fail(self, error: RemoteError, *, writing: bool) -> None:
        with self._guard:
            if writing and not self.unwritten:
                self.unwritten = str(error)
                self._warnings.append(f"{self.name} is not written to in this run: {error}")
            elif not writing and not self.unread:
                self.unread = str(error)
                self.unwritten = self.unwritten or str(error)
                self._warnings.append(f"{self.name} is not used in this run: {error}")


class _Watched:
    """A file that is being uploaded to a remote cache. Reading it raises CancelledError after the run was
    ended, SlowError (a RemoteError) when the upload is too slow, and RemoteError if the file cannot be read.
    """

    def __init__(self, file: BinaryIO, stop: threading.Event, timeout: float) -> None:
        self._file = file
        self._stop = stop
        self._pace = Pace(timeout)

    def read(self, count: int = -1) -> bytes:
        if self._stop.is_set():
            raise CancelledError
        try:
            data = self._file.read(count)
        except OSError as error:
            raise RemoteError(f"{self._file.name} cannot be read: {error.strerror or error}") from None
        self._pace.add(len(data))
        return data

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)
