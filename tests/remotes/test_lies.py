"""Tests of servers that send wrong answers, in each protocol: a proxy in front of a real server changes its
answers.

Whatever the answers are, a build completes with the right result and reports what went wrong.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mlcbuild.remotes import client, s3
from mlcbuild.store.upkeep import verify
from tests import buckets
from tests.caches import Handler, serving
from tests.remotes.users import REUSED, User, statuses

ENDLESS = 300 << 20
"""Size in bytes of an answer that is far larger than any file in the caches of these tests."""


@dataclass(frozen=True)
class Answer:
    """An HTTP answer of the real server behind a proxy. The proxy forwards it, or changes it first to test
    the client."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def kept(self) -> dict[str, str]:
        """Returns those headers of the answer that describe its content and stay valid if the length of the
        content changes."""
        return {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server")
        }


Lie = Callable[[Handler, Answer], None]


@dataclass
class Proxy:
    """A proxy that forwards all requests to a real server. If its function `lie` is set, that function
    changes the answers to read requests."""

    address: str = ""
    lie: Lie | None = None
    kind: str = "everything"
    """The kind of answers that the proxy changes: "everything", or "blobs" for the contents of cached files
    only."""
    blobs: set[str] = field(default_factory=set)
    """Digests that the registry uses as names for the contents of the cached files, collected from the
    manifests that pass through the proxy."""
    dropped: threading.Event = field(default_factory=threading.Event)

    def __call__(self, handler: Handler) -> bool:
        answer = self._ask(handler)
        if "/manifests/cas-" in handler.path and answer.status == 200 and answer.body:
            self.blobs |= {layer["digest"] for layer in json.loads(answer.body)["layers"]}
        if self.lie is None or handler.command != "GET" or answer.status >= 300 or not self._meant(handler):
            handler.answer(answer.status, answer.body, answer.kept, self._length(handler, answer))
        else:
            self.lie(handler, answer)
        return True

    def _ask(self, handler: Handler) -> Answer:
        connection = http.client.HTTPConnection(self.address)
        body = handler.body() if handler.command in ("PUT", "POST", "PATCH") else None
        connection.request(handler.command, handler.path, body, dict(handler.headers))
        actual = connection.getresponse()
        answer = Answer(actual.status, dict(actual.getheaders()), actual.read())
        connection.close()
        return answer

    def _meant(self, handler: Handler) -> bool:
        path = handler.path.partition("?")[0]
        return self.kind == "everything" or "/cas/" in path or path.rpartition("/")[2] in self.blobs

    def _length(self, handler: Handler, answer: Answer) -> int | None:
        return int(answer.headers.get("Content-Length", 0)) if handler.command == "HEAD" else None


def told(change: Callable[[bytes], bytes]) -> Lie:
    """Returns a function that falsifies an answer: it changes the body by `change` and sends it with a
    matching Content-Length, so that only the digest can reveal the change."""

    def lie(handler: Handler, answer: Answer) -> None:
        data = change(answer.body)
        headers = answer.kept
        if "Content-Range" in headers and len(data) != len(answer.body):
            start = int(re.findall(r"\d+", headers["Content-Range"])[0])
            headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{start + len(data)}"
        handler.answer(answer.status, data, headers)

    return lie


def flipped(data: bytes) -> bytes:
    at = random.Random(len(data)).randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def cut(handler: Handler, answer: Answer) -> None:
    """Sends the first half of an answer's body to a client and then closes the connection."""
    handler.answer(answer.status, answer.body[: len(answer.body) // 2], answer.kept, len(answer.body))


def reset(handler: Handler, answer: Answer) -> None:
    """Sends the first half of an answer's body to a client and then resets the TCP connection."""
    cut(handler, answer)
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def endless(handler: Handler, answer: Answer) -> None:
    handler.send_response(200)
    handler.send_header("ETag", '"1"')
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    block = b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20))
    handler.close_connection = True
    for _ in range(ENDLESS >> 20):
        handler.wfile.write(block)


def drops(handler: Handler, answer: Answer) -> None:
    handler.send_response(answer.status)
    for name, value in answer.kept.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(1000 * len(answer.body)))
    handler.end_headers()
    handler.close_connection = True
    proxy = handler.cache.fault
    assert isinstance(proxy, Proxy)
    for byte in answer.body * 1000:
        handler.wfile.write(bytes([byte]))
        if proxy.dropped.wait(0.05):
            return


def with_status(status: int, **headers: str) -> Lie:
    def lie(handler: Handler, answer: Answer) -> None:
        named = {name.replace("_", "-"): value.format(path=handler.path) for name, value in headers.items()}
        handler.answer(status, b"<html>no</html>" if status != 304 else b"", named)

    return lie


def with_headers(**headers: str) -> Lie:
    def lie(handler: Handler, answer: Answer) -> None:
        changed = {name.replace("_", "-"): value for name, value in headers.items()}
        handler.answer(answer.status, answer.body, answer.kept | changed)

    return lie


def raw(data: bytes) -> Lie:
    def lie(handler: Handler, answer: Answer) -> None:
        handler.wfile.write(data)
        handler.close_connection = True

    return lie


def another_range(handler: Handler, answer: Answer) -> None:
    size = len(answer.body)
    handler.answer(206, answer.body[1:], answer.kept | {"Content-Range": f"bytes 1-{size - 1}/{size}"})


def another_version(handler: Handler, answer: Answer) -> None:
    handler.answer(answer.status, answer.body, answer.kept | {"ETag": f'"{secrets.token_hex(4)}"'})


LIES: dict[str, Lie] = {
    "flipped": told(flipped),
    "short": told(lambda data: data[:-1]),
    "long": told(lambda data: data + b"x"),
    "nothing": told(lambda data: b""),
    "page": told(lambda data: b"<!DOCTYPE html><html>Log in to the wireless network</html>"),
    "JSON": told(lambda data: b'{"errors": []}'),
    "zeros": told(lambda data: bytes(len(data))),
    "cut": cut,
    "reset": reset,
    "endless": endless,
    "loop": with_status(307, Location="{path}"),
    "nowhere": with_status(302, Location="http://127.0.0.1:1/"),
    "no address": with_status(302),
    "other protocol": with_status(302, Location="file:///etc/passwd"),
    "login": with_status(401),
    "challenge": with_status(401, WWW_Authenticate='Bearer realm="http://127.0.0.1:1/token"'),
    "odd challenge": with_status(401, WWW_Authenticate="Bearer realm=,,,"),
    "unchanged": with_status(304),
    "teapot": with_status(418),
    "another range": another_range,
    "a range that is none": with_headers(Content_Range="bytes x-y/z"),
    "packed": with_headers(Content_Encoding="gzip"),
    "negative length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabc"),
    "huge length": raw(b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 99999999999999999999999\r\n\r\nabc"),
    "two lengths": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
    "bad chunks": raw(b"HTTP/1.1 200 OK\r\nETag: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"),
    "many headers": raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n"),
    "a long header": raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n"),
    "other headers": raw(b"HTTP/1.1 200 OK\r\nETag: \xff\xfe\x00\r\n\r\n"),
    "nothing said": raw(b""),
    "another version": another_version,
    "drops": drops,
}
HARMLESS = {"packed", "a range that is none", "another version"}
"""Names of changes to a server's answers that a correct client may ignore, because it does not need the part
of the answer that the proxy changed."""


HEALED = {"cut", "reset"}
"""Names of changes to a server's answers after which a client recovers by requesting the rest of the
answer."""
OF_BLOBS = (
    *("flipped", "short", "long", "nothing", "page", "cut", "reset", "endless", "loop", "nowhere", "login"),
    *("teapot", "another range", "another version", "negative length", "nothing said", "drops"),
)
"""Names of changes to a server's answers that the proxy applies only to blobs (contents of files), so that a
client meets them after it has received a record, which lists the files. All other changes are applied to all
requests."""


@pytest.fixture(scope="module", params=["http", "s3", "oci"])
def proxied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Proxy, str]]:
    """Yields (a proxy that can falsify answers, the URL of a shared cache through that proxy), for caches on
    a web server, in S3 and in an OCI registry. A first user has uploaded all results to the cache."""
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        for module in (client, s3):
            patched.setattr(module, "PAUSES", (0.01, 0.02))
        if request.param == "http":
            real, rest = stack.enter_context(serving()).url, "{}"
        elif request.param == "s3":
            patched.setenv("AWS_ACCESS_KEY_ID", buckets.ACCESS)
            patched.setenv("AWS_SECRET_ACCESS_KEY", buckets.SECRET)
            server = request.getfixturevalue("s3_server")
            url = server.bucket(f"b{secrets.token_hex(8)}")
            real, rest = server.endpoint, url.replace(server.endpoint, "{}")
        else:
            server = request.getfixturevalue("registry_server")
            real, rest = f"http://127.0.0.1:{server.port}", f"oci://{{}}/b{secrets.token_hex(8)}"
        proxy = Proxy(urlsplit(real).netloc)
        address = stack.enter_context(serving(proxy)).url
        url = rest.format(address[7:] if request.param == "oci" else address)
        assert User(tmp_path_factory.mktemp("first") / "store", url).run().not_uploaded == {}
        yield proxy, url


@pytest.mark.parametrize(
    ("kind", "name"), [*(("everything", name) for name in LIES), *(("blobs", name) for name in OF_BLOBS)]
)
def test_a_lie_costs_a_warning_and_no_more(
    name: str, kind: str, proxied: tuple[Proxy, str], tmp_path: Path
) -> None:
    proxy, url = proxied
    user = User(tmp_path / "store", url)
    user.timeout = 1.0 if name == "drops" else user.timeout
    proxy.dropped.clear()
    proxy.lie, proxy.kind = LIES[name], kind
    try:
        result = user.run()
    finally:
        proxy.lie = None
        proxy.dropped.set()
    assert result.ok, [actual.error for actual in result.steps]
    assert user.text(result, "c") == "C\nB\nA" and verify(user.store).ok
    assert all(path.stat().st_size for path in user.store.root.glob("partial/*"))
    healed = statuses(result) == REUSED
    assert user.warnings() or healed, "what went wrong is said"
    assert not healed or name in HARMLESS | HEALED
    assert len(user.warnings()) < 6 and all(len(warning) < 400 for warning in user.warnings())
    assert not re.search(r"Traceback|Error\(|0x[0-9a-f]{6}|X-Amz", "".join(user.warnings()))
