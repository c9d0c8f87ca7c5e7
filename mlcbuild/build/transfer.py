"""Background threads that download inputs and upload results during a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

from mlcbuild.build.events import StepProgress, StepResult, Warned
from mlcbuild.canon import Entry
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.remotes.transport import CancelledError
from mlcbuild.store.records import Record

_DOWNLOADS, _UPLOADS = 4, 2
"""Number of threads that download inputs of build steps, and number of threads that upload results, which
delay no step. With 48 files on a server 20 ms away, one download thread takes 3.6 to 4.0 times as long as
four, and eight take 0.6 times as long; but each large file has up to ranges.AHEAD requests under way, so that
four are 24 connections. `ci/bench/constants transfer._DOWNLOADS` compares other numbers.
"""
_PROGRESS_INTERVAL = 0.2
"""Minimum seconds between two progress events of a download."""
_JOIN = 1.0
"""Maximum seconds for which `close` waits until the threads of downloads and uploads have ended."""


@dataclass(frozen=True)
class Fetched:
    """Message to the main loop of a run: a download of files of one build step's result has ended."""

    request: int
    why: str
    """The error message if a file of the download could not be fetched; "" if all its files are in the
    store.
    """


Message: TypeAlias = Fetched | StepProgress | Warned
_Task: TypeAlias = Callable[[], None]


@dataclass
class _Request:
    """A request to download some files of one build step's result."""

    number: int
    step: str
    """Name of the step whose files are downloaded."""
    left: int
    total: int
    done: int = 0
    why: str = ""
    last_progress: float = field(default_factory=time.monotonic)


class Transfers:
    """Downloads and uploads files of build steps in background threads.

    wake: called without arguments, from any thread, when the method `messages` has new messages.
    """

    def __init__(self, sharing: Sharing, wake: Callable[[], None]) -> None:
        self.not_uploaded: dict[str, tuple[str, ...]] = {}
        """Name of a build step -> URLs of the remote caches that lack its result. The mapping is complete
        once `close` has returned.
        """
        self._sharing = sharing
        self._wake = wake
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._count = 0
        self._pending: dict[str, Record] = {}
        self._downloads: SimpleQueue[_Task] = SimpleQueue()
        self._uploads: SimpleQueue[_Task] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def fetch(self, step: str, files: Sequence[Entry]) -> int:
        """Starts to download files of a step's result from remote caches into the store, and returns a number
        that identifies the download. step: the step's name, for progress messages.
        """
        self._count += 1
        distinct = {entry.digest: entry for entry in files}
        total = sum(entry.size for entry in distinct.values())
        request = _Request(self._count, step, len(distinct), total)
        if not distinct:
            self._messages.put(Fetched(request.number, ""))
            self._wake()
        for entry in distinct.values():
            self._downloads.put(partial(self._fetch, request, entry))
        self._start(self._downloads, _DOWNLOADS)
        return request.number

    def upload(self, step: str, record: Record) -> None:
        """Queues the upload of a build step's result to all remote caches that accept writes. step: its name;
        record: the step record, which lists the files.
        """
        if not self._sharing.writers:
            return
        with self._guard:
            self._pending[step] = record
        self._uploads.put(partial(self._send, step, record))
        self._start(self._uploads, _UPLOADS)

    def resume(self, results: Iterable[StepResult]) -> int:
        """Queues uploads of earlier results of build steps that a remote cache may lack, because an upload
        was interrupted or the remote is new. Returns the number of queued uploads.
        """
        by_key = {result.key: result for result in results if result.key is not None}
        count = 0
        for key in sorted(self._sharing.unsent(by_key)):
            record = by_key[key].record
            if record is not None and not self._sharing.store.lost(record):
                self.upload(by_key[key].name, record)
                count += 1
        return count

    @property
    def uploading(self) -> int:
        """Returns the number of results of build steps that wait for their upload or are being uploaded."""
        return len(self._pending)

    def messages(self) -> list[Message]:
        messages = []
        while True:
            try:
                messages.append(self._messages.get_nowait())
            except Empty:
                return messages

    def close(self) -> None:
        """Stops all downloads and uploads at once. Steps whose results were not uploaded completely are then
        listed in the attribute `not_uploaded`.
        """
        self._stop.set()
        self._sharing.close()
        for _ in self._threads:  # one for each thread
            self._downloads.put(_nothing)
            self._uploads.put(_nothing)
        end = time.monotonic() + _JOIN
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._guard:
            self.not_uploaded |= dict.fromkeys(self._pending, self._sharing.writers)

    def _start(self, tasks: SimpleQueue[_Task], most: int) -> None:
        mine = [thread for thread in self._threads if thread.name == str(id(tasks))]
        if len(mine) < most:
            thread = threading.Thread(target=self._work, args=(tasks,), name=str(id(tasks)), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, tasks: SimpleQueue[_Task]) -> None:
        while not self._stop.is_set():
            tasks.get()()

    def _fetch(self, request: _Request, entry: Entry) -> None:
        why = "the run ends"
        if not self._stop.is_set() and not request.why:
            try:
                why = self._sharing.fetch(entry, self._stop, partial(self._note, request))
            except CancelledError:
                pass
            # A defect must also end the request, or the main loop would wait for ever.
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        with self._guard:
            request.left -= 1
            request.why = request.why or why
            ended = request.left == 0
        if ended:
            self._messages.put(Fetched(request.number, request.why))
            self._wake()

    def _note(self, request: _Request, count: int) -> None:
        with self._guard:
            request.done += count
            now = time.monotonic()
            if now - request.last_progress < _PROGRESS_INTERVAL:
                return
            request.last_progress = now
        self._messages.put(StepProgress(request.step, request.done, request.total, "B"))
        self._wake()

    def _send(self, step: str, record: Record) -> None:
        try:
            missing = self._sharing.send(record, self._stop)
        except CancelledError:
            return
        except Exception as error:  # A defect must also end the upload, or the main loop would wait for ever.
            missing = self._sharing.writers
            self._messages.put(Warned(f"{step} was not uploaded: {type(error).__name__}: {error}"))
        with self._guard:
            if missing:
                self.not_uploaded[step] = missing
            else:
                self._sharing.kept(record.key)
            del self._pending[step]
        self._wake()


def _nothing() -> None:
    return
