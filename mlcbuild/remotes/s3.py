"""S3 and what speaks its protocol: `s3://bucket/prefix`, with `?endpoint=https://host&region=name`.

obstore talks to the server. Large objects are read as several ranges at once, all of one version, and written
in parts; what is small is put only where nothing is yet, if the server can do that. Signatures hold for one
host only, so a recipe may name the endpoint. Credentials are those of other S3 tools: environment variables,
then the files in ~/.aws.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError as EndedError
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast
from urllib.parse import unquote, urlsplit

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.aws import settings
from mlcbuild.remotes.transport import CHUNK, CONNECT, PAUSES, SLOWEST, TIMEOUT, Body, Buffer, SlowError

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, S3Store

PIECE = 4 << 20
"""Bytes of a range."""
AHEAD = 4
"""Ranges of one object on their way."""
PART = 8 << 20
"""Bytes of a part of an upload; what is not larger is put in one request."""
PARTS = 4
"""Parts of one upload on their way."""
_MOST_PARTS = 10_000
Result = TypeVar("Result")


class S3:
    """A transport. Raises RemoteError when obstore is not installed, or no credentials are."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        try:
            import obstore  # noqa: F401
        except ImportError:
            raise RemoteError("it needs the package obstore: pip install 'mlcbuild[s3]'") from None
        parts = urlsplit(url)
        self._bucket = parts.netloc
        self._prefix = unquote(parts.path.strip("/"))
        self._timeout = timeout
        self._patience = timeout + 2 * PAUSES[-1]  # obstore tries again meanwhile
        self._tasks: set[Future[Any]] = set()
        self._guard = threading.Lock()
        self._closed = False
        self._creates = True
        """Whether the server is thought to know conditional requests."""
        chosen = settings(url)

        self._reading = self._store(chosen, {"read_timeout": timeout, "timeout": PIECE // SLOWEST * AHEAD})
        # A read timeout would end long uploads: it counts from the first byte of the question.
        self._writing = self._store(chosen, {"timeout": timeout + PART * PARTS / SLOWEST})

    def _store(self, chosen: dict[str, Any], timeouts: dict[str, float]) -> S3Store:
        from obstore.store import S3Store

        options: dict[str, Any] = {
            "allow_http": str(chosen.get("endpoint", "")).startswith("http://"),
            "connect_timeout": f"{min(self._timeout, CONNECT)}s",
            "user_agent": "mlcbuild",
            **{name: f"{seconds}s" for name, seconds in timeouts.items()},
        }
        first, last = (timedelta(seconds=pause) for pause in PAUSES)
        return S3Store(
            self._bucket,
            client_options=cast("ClientConfig", options),
            retry_config={
                "max_retries": len(PAUSES),
                "backoff": {"init_backoff": first, "max_backoff": last, "base": 5},
                "retry_timeout": timedelta(minutes=1),
            },
            **chosen,
        )

    def open(self, name: str, start: int = 0) -> Body | None:
        try:
            first = self._wait(self._start(self._piece(name, start)))
        except FileNotFoundError:
            return None
        except _RangeError:  # shorter than it should be: what is there, from the beginning
            start, first = 0, self._wait(self._start(self._whole(name)))
        reader = _Reader(self, name, start, first)
        return Body(start, reader.read, reader.close)

    def size(self, name: str) -> int | None:
        import obstore

        async def ask() -> int:
            question = obstore.head_async(self._reading, self._path(name))
            return (await asyncio.wait_for(question, self._patience))["size"]

        try:
            return self._wait(self._start(ask()))
        except FileNotFoundError:
            return None

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        import obstore

        source.seek(0)
        if size > PART:
            part = max(PART, -(-size // _MOST_PARTS))
            pieces = _pieces(source, size, part)
            self._put(name, pieces, use_multipart=True, chunk_size=part, max_concurrency=PARTS)
            return
        data = b"".join(_pieces(source, size, CHUNK))
        if new and self._creates:
            try:
                self._put(name, data, mode="create", use_multipart=False)
                return
            except obstore.exceptions.AlreadyExistsError:
                return  # somebody else was faster
            except _UnknownError:
                self._creates = False
        self._put(name, data, use_multipart=False)

    def close(self) -> None:
        with self._guard:
            self._closed = True
            tasks = list(self._tasks)
        for task in tasks:
            task.cancel()

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    async def _piece(self, name: str, start: int, before: _Piece | None = None) -> _Piece:
        """A range of an object; of the version of the piece `before`, and in one if that one came fast."""
        import obstore

        began = time.monotonic()
        options: Any = {"range": (start, start + PIECE)}
        if before is not None and before.etag:
            options["if_match"] = before.etag
        question = obstore.get_async(self._reading, self._path(name), options=options)
        found = await asyncio.wait_for(question, self._patience)
        if before is not None and before.fast:
            try:
                data = memoryview(await asyncio.wait_for(found.bytes_async(), self._timeout))
            except TimeoutError:  # it is no longer fast, which need not be too slow
                return await self._piece(name, start, replace(before, fast=False))
        else:
            data = memoryview(await self._slowly(found))
        fast = time.monotonic() - began < self._timeout / 8
        return _Piece(data, found.meta["size"], found.meta["e_tag"], fast)

    async def _slowly(self, found: GetResult) -> bytearray:
        """A body in chunks so small that one which takes longer than the timeout is slower than SLOWEST."""
        stream = found.stream(min_chunk_size=max(1, int(SLOWEST * self._timeout / AHEAD)))
        data = bytearray()
        while True:
            try:
                data += await asyncio.wait_for(anext(stream), self._timeout)
            except StopAsyncIteration:
                return data
            except TimeoutError:
                raise SlowError(f"it is too slow: {len(data)} bytes in {self._timeout:.0f} seconds") from None

    async def _whole(self, name: str) -> _Piece:
        import obstore

        found = await asyncio.wait_for(obstore.get_async(self._reading, self._path(name)), self._patience)
        data = memoryview(await asyncio.wait_for(found.bytes_async(), self._timeout))
        return _Piece(data, len(data), found.meta["e_tag"])

    def _put(self, name: str, data: bytes | Iterator[bytes], **options: Any) -> None:
        import obstore

        async def put() -> None:
            await obstore.put_async(self._writing, self._path(name), data, **options)

        try:
            self._wait(self._start(put()))
        except FileNotFoundError:
            raise RemoteError(f"there is no bucket {self._bucket}: create it") from None

    def _start(self, question: Coroutine[Any, Any, Result]) -> Future[Result]:
        with self._guard:  # a task that is started is one that `close` finds
            if not self._closed:
                task = asyncio.run_coroutine_threadsafe(question, _loop())
                self._tasks.add(task)
                return task
        question.close()
        raise RemoteError("the run ends")

    def _wait(self, task: Future[Result]) -> Result:
        """Raises RemoteError; FileNotFoundError, AlreadyExistsError and what a source raises as it is."""
        from obstore import exceptions

        try:
            return task.result()
        except EndedError:
            raise RemoteError("the run ends") from None
        except TimeoutError:
            raise RemoteError("it does not answer") from None
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise RemoteError(f"there is no bucket {self._bucket}: create it") from None
            raise
        except exceptions.AlreadyExistsError:
            raise
        except exceptions.BaseError as error:
            raise _explained(error) from None
        finally:
            with self._guard:
                self._tasks.discard(task)


class _RangeError(RemoteError):
    """A range that begins at or behind the end."""


class _UnknownError(RemoteError):
    """A request of a kind that the server does not know."""


@dataclass(frozen=True)
class _Piece:
    """Bytes of an object, and what the whole is."""

    data: memoryview
    size: int
    etag: str | None
    fast: bool = False
    """Whether it came in a fraction of the time that it may take."""


class _Reader:
    """The bytes of an object in order, with the next ranges on their way."""

    def __init__(self, transport: S3, name: str, start: int, first: _Piece) -> None:
        self._transport = transport
        self._name = name
        self._last = first
        self._given = False
        self._next = start + len(first.data)
        self._ahead: deque[Future[_Piece]] = deque()
        self._fill()

    def read(self) -> Buffer:
        if self._given:
            if not self._ahead:
                return b""
            self._last = self._transport._wait(self._ahead.popleft())
            self._fill()
        self._given = True
        return self._last.data

    def close(self) -> None:
        for task in self._ahead:
            task.cancel()

    def _fill(self) -> None:
        while len(self._ahead) < AHEAD and self._next < self._last.size:
            piece = self._transport._piece(self._name, self._next, self._last)
            self._ahead.append(self._transport._start(piece))
            self._next += PIECE


def _pieces(source: BinaryIO, size: int, most: int) -> Iterator[bytes]:
    """Exactly `size` bytes of a source. Raises OSError when it has fewer, which ends an upload."""
    left = size
    while left:
        data = source.read(min(most, left))
        if not data:
            raise OSError(f"{left} of {size} bytes to send are missing")
        left -= len(data)
        yield data


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Runs in a thread of its own as long as the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="s3", daemon=True).start()
    return loop


_WORDS = {
    "ConnectionRefused": "Connection refused",
    "ConnectionReset": "Connection reset by peer",
    "dns error": "its name is not known",
    "IncompleteMessage": "its answer ended early",
    "end of file": "its answer ended early",
    "Parse(": "its answer is not HTTP",
    "non-partial": "it does not know ranges",
    "timed out": "it does not answer",
    "TimedOut": "it does not answer",
}
"""What stands in obstore's errors, and what it means."""


def _explained(error: Exception) -> RemoteError:
    """obstore's errors hold pages of internals; their kinds are told by words in them."""
    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>([A-Za-z0-9]{1,60})</Code>", text)
    if status is not None:
        return _refusal(int(status[1]), code[1] if code else "")
    if type(error).__name__ == "NotSupportedError":
        return _UnknownError("it does not know a request of this kind")
    if found := re.search(r"certificate[^\"\n]*|UnknownIssuer", text):
        return RemoteError(f"its certificate is not valid: {found[0].rstrip(') ')}")
    known = (sentence for sign, sentence in _WORDS.items() if sign in text)
    return RemoteError(next(known, text.partition("\n")[0][:200]))


def _refusal(status: int, code: str) -> RemoteError:
    words = f"status {status}, {code}" if code else f"status {status}"
    if status == 416:
        return _RangeError("it answered another range than the one it was asked for")
    if status == 412:
        return RemoteError(f"the object was replaced while it was read ({words})")
    if status in (405, 501):
        return _UnknownError(f"it answered with {words}")
    if status in (413, 507) or "Quota" in code:
        return RemoteError(f"it is full ({words})")
    if status in (401, 403):
        skewed = "its clock and that of this machine differ by more than it allows"
        why = skewed if code == "RequestTimeTooSkewed" else "it refuses the credentials"
        return RemoteError(f"{why} ({words})")
    return RemoteError(f"it answered with {words}")
