"""A transport for S3 and compatible servers: `s3://bucket/prefix`, with `?endpoint=https://host&region=name`.

obstore signs URLs and uploads large objects in parts. The project's HTTP client reads objects, in ranges of
one version, and uploads small ones, conditionally if the server supports it. Signatures are valid for one
host only, so a recipe may name the endpoint. Credentials are those of other S3 tools: environment variables,
then the files in ~/.aws.
"""

from __future__ import annotations

import asyncio
import io
import re
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError as EndedError
from concurrent.futures import Future
from datetime import timedelta
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, cast
from urllib.parse import unquote, urlsplit

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.aws import settings
from mlcbuild.remotes.background import Background
from mlcbuild.remotes.client import Client, Response, status_words
from mlcbuild.remotes.ranges import AHEAD, FIRST, Range, Ranges
from mlcbuild.remotes.transport import CHUNK, CONNECT, PAUSES, SLOWEST, TIMEOUT, Body, SlowError, whole_number

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Store

PART = 8 << 20
"""Bytes in one part of an upload, more only for objects of over 10,000 parts; objects up to this size are
uploaded in one request. S3 accepts parts from 5 MiB on. 1 GiB takes 128 requests, and PARTS of them hold 32
MiB. `ci/bench/remotes s3 --set mlcbuild.remotes.s3.PART=16777216` prints the rate with another size."""
PARTS = 4
"""Number of parts of one upload that are sent at the same time."""
_MOST_PARTS = 10_000
EXPIRY = timedelta(minutes=20)
"""Validity of a signed URL, which is used for 5 minutes only: clocks may be 15 minutes ahead or behind."""
_SKEW = 15 * 60
"""Seconds by which this machine's clock may differ from that of an S3 server."""
Result = TypeVar("Result")


class S3:
    """The transport for a remote cache in one bucket. Creating it raises RemoteError when obstore or
    credentials are missing, or an AWS file cannot be parsed."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        try:
            import obstore  # noqa: F401
        except ImportError:
            raise RemoteError("it needs the package obstore: pip install 'mlcbuild[s3]'") from None
        parts = urlsplit(url)
        self._bucket = parts.netloc
        self._prefix = unquote(parts.path.strip("/"))
        self._timeout = timeout
        self._tasks = _Tasks(self._bucket)
        self._guard = threading.Lock()
        self._creates = True
        """True while uploads state the condition that the object must not exist yet; False once the server
        has answered that it does not know this condition."""
        self._rate = 0.0
        """Rate of the fastest upload so far, in bytes per second; parts must reach a sixteenth of it."""
        self._settings = chosen = settings(url)
        # obstore's read timeout starts with the first byte of the request, so a short one would end long
        # uploads.
        self._store = self._opened(chosen, timeout + PART * PARTS / SLOWEST)
        login = {"access_key_id": "nobody", "secret_access_key": "none", "skip_signature": False}
        self._signing = self._opened(chosen | login if self._is_anonymous else chosen, timeout)
        self._client: Client | None = None
        self._readers = Background(AHEAD)

    @property
    def _is_anonymous(self) -> bool:
        return bool(self._settings.get("skip_signature", False))

    @property
    def _patience(self) -> float:
        """Returns the maximum seconds in which obstore, the S3 client library, must sign a URL or start to
        read an upload."""
        return self._timeout + 2 * PAUSES[-1]

    def _opened(self, chosen: Mapping[str, Any], timeout: float) -> S3Store:
        from obstore.store import S3Store

        options: dict[str, Any] = {
            "allow_http": str(chosen.get("endpoint", "")).startswith("http://"),
            "connect_timeout": f"{min(self._timeout, CONNECT)}s",
            "timeout": f"{timeout}s",
            "user_agent": "mlcbuild",
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
        item = _Object(self, name)
        first = item.range(start, start + FIRST)
        if first is None:
            return None
        rest = Ranges(first, item.more, self._readers)
        return Body(first.body.start, rest.read, rest.close)

    def size(self, name: str) -> int | None:
        client, response = self.ask("HEAD", self.sign("HEAD", name))
        client.end(response)
        if response.status == 404:
            return None
        if response.status != 200:
            raise self.refused(response, b"")
        return whole_number(response.headers.get("Content-Length", ""))

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        source.seek(0)
        began = time.monotonic()
        if size > PART:
            self._put_parts(name, source, size)
        else:
            self._put_whole(name, b"".join(_pieces(source, size, CHUNK)), new)
        self._rate = max(self._rate, size / max(time.monotonic() - began, 1e-3))

    def close(self) -> None:
        self._tasks.close()
        self._readers.close()
        with self._guard:
            client = self._client
        if client is not None:
            client.close()

    def sign(self, method: Literal["GET", "HEAD", "PUT"], name: str) -> str:
        """Returns a signed URL of an object for one method, valid for 20 minutes; without a signature if the
        bucket is used without credentials. The URL is a secret. A failure, or the end of the run, raises
        RemoteError."""
        import obstore

        async def sign() -> str:
            question = obstore.sign_async(self._signing, method, self._path(name), EXPIRY)
            return await asyncio.wait_for(question, self._patience)  # Credentials may come from a server.

        url = self._tasks.run(sign())
        return url.partition("?")[0] if self._is_anonymous else url

    def ask(
        self,
        method: str,
        signed: str,
        headers: Mapping[str, str] | None = None,
        source: BinaryIO | None = None,
    ) -> tuple[Client, Response]:
        parts = urlsplit(signed)
        with self._guard:
            self._tasks.check()
            client = self._client or Client(f"{parts.scheme}://{parts.netloc}", self._timeout)
            self._client = client
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        return client, client.ask(method, target, headers, source)

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    def refused(self, response: Response, answer: bytes) -> RemoteError:
        code = re.search(rb"<Code>([A-Za-z0-9]{1,60})</Code>", answer)
        region = response.headers.get("x-amz-bucket-region", "")
        if region != self._settings["region"] and re.fullmatch(r"[a-z0-9-]{1,30}", region):
            return RemoteError(f"the bucket is in the region {region}: write region={region} into its URL")
        if code is not None and code[1] == b"NoSuchBucket":
            return RemoteError(f"there is no bucket {self._bucket}: create it")
        return _refusal(response.status, code[1].decode() if code else "", response.headers.get("Date", ""))

    def _put_whole(self, name: str, data: bytes, new: bool) -> None:
        conditions = [{"If-None-Match": "*"}, {}] if new and self._creates else [{}]
        for condition in conditions:
            headers = {"Content-Length": str(len(data)), **condition}
            client, response = self.ask("PUT", self.sign("PUT", name), headers, io.BytesIO(data))
            answer = client.end(response)
            if response.status in (200, 201, 204) or (condition and response.status == 412):
                return  # 412: another process was faster
            if not condition or response.status not in (405, 409, 501):
                raise self.refused(response, answer)
            self._creates = self._creates and response.status == 409  # 409: another process is writing it

    def _put_parts(self, name: str, source: BinaryIO, size: int) -> None:
        import obstore

        part = max(PART, -(-size // _MOST_PARTS))
        # Maximum seconds for the parts in flight. A server whose disk is full may not answer.
        longest = self._timeout + PARTS * part / max(SLOWEST, self._rate / 16)
        until = time.monotonic() + self._patience

        def pieces() -> Iterator[bytes]:  # The first piece is read only once the upload has begun.
            nonlocal until
            for piece in _pieces(source, size, part):
                until = time.monotonic() + longest
                yield piece
            until = time.monotonic() + longest

        async def put() -> None:
            options: dict[str, Any] = {"chunk_size": part, "max_concurrency": PARTS}
            sent = asyncio.ensure_future(
                obstore.put_async(self._store, self._path(name), pieces(), use_multipart=True, **options)
            )
            try:
                while not sent.done():
                    if (left := until - time.monotonic()) <= 0:
                        raise TimeoutError
                    await asyncio.wait({sent}, timeout=left)
                await sent
            finally:
                sent.cancel()

        self._tasks.run(put())


class _Tasks:
    """The running calls of obstore, the client library for S3. Closing the transport cancels them."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self._guard = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._closed = False

    def check(self) -> None:
        """Raises RemoteError if the S3 transport is closed."""
        if self._closed:
            raise RemoteError("the run ends")

    def run(self, question: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine of obstore, the S3 client, and returns its result. Raises RemoteError if it fails
        or exceeds its own time limit, or the run ends; passes on what an upload's source raises."""
        from obstore import exceptions

        task = self._start(question)
        try:
            return task.result()
        except EndedError:
            raise RemoteError("the run ends") from None
        except TimeoutError:
            raise SlowError("it does not answer") from None
        except FileNotFoundError:
            raise RemoteError(f"there is no bucket {self._bucket}: create it") from None
        except exceptions.BaseError as error:
            raise _explained(error) from None
        finally:
            with self._guard:
                self._running.discard(task)

    def _start(self, question: Coroutine[Any, Any, Result]) -> Future[Result]:
        with self._guard:  # The lock makes sure that `close` sees every task that starts.
            if not self._closed:
                task = asyncio.run_coroutine_threadsafe(question, _loop())
                self._running.add(task)
                return task
        question.close()
        raise RemoteError("the run ends")

    def close(self) -> None:
        with self._guard:
            self._closed = True
            running = list(self._running)
        for task in running:
            task.cancel()


class _Object:
    """One object in the bucket and its signed URL, which is renewed before it expires."""

    def __init__(self, transport: S3, name: str) -> None:
        self._transport = transport
        self._name = name
        self._signed = ""
        self._until = 0.0

    def range(self, start: int, end: int, version: str = "", share: int = 1) -> Range | None:
        """Requests the bytes start..end-1 of the object; if it has none of them and `version` is "", the
        whole object. Returns the response, which may hold the whole object, or None if there is no such
        object. version: ETag that it must have, or "". share: number of concurrent transfers, which together
        must reach the minimum rate. Raises RemoteError for other answers, and for another ETag or range."""
        headers = {"Range": f"bytes={start}-{end - 1}", **({"If-Match": version} if version else {})}
        client, response = self._ask(headers)
        if response.status == 416 and not version:
            client.end(response)
            client, response = self._ask({})
        if response.status == 200:
            return Range(client.body(response, 0, share), 0, "")
        if response.status != 206:
            answer = client.end(response)
            if response.status == 404 and b"NoSuchBucket" not in answer:
                return None
            raise self._transport.refused(response, answer)
        body = client.body(response, start, share)
        stated = re.fullmatch(r"bytes [0-9]+-([0-9]{1,18})/([0-9]{1,18})", response.headers["Content-Range"])
        if stated is None or int(stated[1]) + 1 != min(end, int(stated[2])):
            body.close()
            raise RemoteError("it sent another range than the requested one")
        return Range(body, int(stated[2]), _version(response))

    def more(self, start: int, end: int, version: str, share: int) -> Range:
        response = self.range(start, end, version, share)
        if response is None:
            raise RemoteError("the object was removed while it was read")
        return response

    def _ask(self, headers: Mapping[str, str]) -> tuple[Client, Response]:
        now = time.monotonic()
        if now >= self._until:
            self._signed = self._transport.sign("GET", self._name)
            self._until = now + EXPIRY.total_seconds() - _SKEW
        return self._transport.ask("GET", self._signed, headers)


def _pieces(source: BinaryIO, size: int, most: int) -> Iterator[bytes]:
    """Yields exactly `size` bytes of a source in pieces of at most `most` bytes. Raises RemoteError, which
    ends an upload, if the source has fewer."""
    left = size
    while left:
        data = source.read(min(most, left))
        if not data:
            raise RemoteError(f"{left} of {size} bytes to send are missing")
        left -= len(data)
        yield data


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop, which the first call starts in a thread that lives as long as the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="s3", daemon=True).start()
    return loop


def _version(response: Response) -> str:
    """Returns the ETag of a response, or "" if it has none or a weak one, which does not identify the
    bytes."""
    tag = response.headers.get("ETag", "")
    return tag if re.fullmatch(r"(?!W/)[\x21-\x7e]{1,200}", tag) else ""


def _is_skewed(date: str) -> bool:
    try:
        return abs(parsedate_to_datetime(date).timestamp() - time.time()) > _SKEW
    except (ValueError, OverflowError):
        return False


_WORDS = {
    "ConnectionRefused": "Connection refused",
    "ConnectionReset": "Connection reset by peer",
    "dns error": "its name is not known",
    "IncompleteMessage": "its answer ended early",
    "end of file": "its answer ended early",
    "Parse(": "its answer is not HTTP",
    "timed out": "it does not answer",
    "TimedOut": "it does not answer",
}
"""Text in error messages of obstore, the S3 client -> its meaning, as the end of a sentence."""


def _explained(error: Exception) -> RemoteError:
    """Returns a RemoteError for an error of obstore. An HTTP status or known words in its text select the
    message, which else is the first line, up to 200 characters, without the queries of URLs."""
    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>([A-Za-z0-9]{1,60})</Code>", text)
    if status is not None:
        return _refusal(int(status[1]), code[1] if code else "")
    if match := re.search(r"certificate[^\"\n]*|UnknownIssuer", text):
        return RemoteError(f"its certificate is not valid: {match[0].rstrip(') ')}")
    meanings = (sentence for sign, sentence in _WORDS.items() if sign in text)
    # The query of a URL is removed, because it may hold a secret.
    words = re.sub(r"\?\S*", "", text.partition("\n")[0])
    return RemoteError(next(meanings, words[:200]))


def _refusal(status: int, code: str, date: str = "") -> RemoteError:
    """Returns the RemoteError for an unexpected HTTP status and S3 error code. date: the response's Date
    header or "", by which a 401 or 403 may be explained by a wrong clock."""
    words = f"status {status}, {code}" if code else f"status {status}"
    if status == 412:
        return RemoteError(f"the object was replaced while it was read ({words})")
    if "Quota" in code:
        return RemoteError(f"it is full ({words})")
    if status in (401, 403):
        skewed = "its clock and that of this machine differ by more than it allows"
        why = skewed if _is_skewed(date) or code == "RequestTimeTooSkewed" else "it refuses the credentials"
        return RemoteError(f"{why} ({words})")
    return RemoteError(status_words(status, code))
