"""Tests of malformed answers: each costs one warning that names the remote.

The tests do not try a list of known faults; they try odd values in every header and JSON field that is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.oci_reference import parse
from mlcbuild.remotes.registry import Registry
from mlcbuild.remotes.transport import Body, Bordered
from tests.caches import Cache, Handler, serving
from tests.remotes.odd_values import (
    ADDRESSES,
    FIELDS,
    HEADERS,
    NUMBERS,
    PROTOCOLS,
    VALUES,
    manifest,
    plain,
    saying,
    uploading,
)
from tests.remotes.users import CHAIN, User, statuses, step

__all__ = ["plain"]
pytestmark = pytest.mark.usefixtures("plain")


EVERY = "MLCBUILD_TEST_EVERY" in os.environ


Value = TypeVar("Value")


@pytest.fixture(params=PROTOCOLS)
def address(request: pytest.FixtureRequest) -> Callable[[Cache], str]:
    if request.param == "http":
        return lambda cache: cache.url
    if request.param == "oci":
        return lambda cache: f"oci://{cache.url[7:]}/r"
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'mlcbuild[s3]'")
    request.getfixturevalue("s3_login")
    return lambda cache: cache.bucket


def costs_a_warning(address: str, root: Path, what: object) -> None:
    user = User(root, address)
    user.timeout = 5.0
    result = user.run(ONE)
    assert statuses(result) == {"a": "built"}, (what, result)
    assert 1 <= len(user.warnings()) <= 3, (what, user.warnings())
    for warning in user.warnings():
        assert warning.startswith(address) and len(warning) < 500, what
        assert warning.isprintable(), (what, warning)


ONE = type(CHAIN)([step("a", text="A")])


def shared_out(values: Sequence[Value], part: int, parts: int) -> list[Value]:
    """Returns the part of `values` that test number `part` of `parts` tests tries. Together the tests try
    every value; with MLCBUILD_TEST_EVERY each test tries all."""
    return list(values) if EVERY else list(values[part::parts])


@pytest.mark.parametrize(("status", "name"), HEADERS)
def test_odd_headers(
    status: int, name: str, request: pytest.FixtureRequest, address: Callable[[Cache], str], tmp_path: Path
) -> None:
    part = PROTOCOLS.index(request.node.callspec.params["address"])
    with serving() as cache:
        for number, value in enumerate(shared_out(HEADERS[status, name], part, len(PROTOCOLS))):
            cache.fault = saying(status, name, value)
            costs_a_warning(address(cache), tmp_path / str(number), (status, name, value[:80]))


def test_odd_places_to_send_to(tmp_path: Path) -> None:
    with serving() as cache:
        for number, value in enumerate([*ADDRESSES, *NUMBERS, "/v2/\x01", "/v2/é", "/v2/" + "x" * 60_000]):
            cache.fault = uploading(value)
            costs_a_warning(f"oci://{cache.url[7:]}/r", tmp_path / str(number), value[:80])


RAW = [
    *(b"", b"\0", b"\r\n\r\n", b"HTTP/1.1\r\n\r\n", b"HTTP/1.1 99 x\r\n\r\n", b"HTTP/1.1 x x\r\n\r\n"),
    *(
        b"HTTP/9.9 200 x\r\n\r\n",
        b"ICY 200 x\r\n\r\n",
        b"HTTP/1.1 20000 x\r\n\r\n",
        b"HTTP/1.1 -200 x\r\n\r\n",
    ),
    *(
        b"HTTP/1.1 200 x\r\n" + b"A: b\r\n" * 500 + b"\r\n",
        b"HTTP/1.1 200 x\r\nA: " + b"b" * 70_000 + b"\r\n\r\n",
    ),
    *(
        b"HTTP/1.1 200 \xff\xfe\r\n\xff: \xff\r\n\r\n",
        b"HTTP/1.1 200 x\r\n: x\r\nno colon\r\n\r\n",
        b"\xff" * 70_000,
    ),
    b"HTTP/1.1 200 x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    *(
        b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n" + data
        for data in (
            b"",
            b"x\r\n",
            b"-1\r\n",
            b"-5\r\nhello",
            b"f" * 70_000,
            b"5\r\nhelloXX",
            b"\r\n",
            b"fffffffffff\r\nx",
        )
    ),
]


def test_odd_bytes(address: Callable[[Cache], str], request: pytest.FixtureRequest, tmp_path: Path) -> None:
    # The client of web servers is also that of registries: these two share the answers out.
    part = {"http": (0, 2), "oci": (1, 2)}.get(request.node.callspec.params["address"], (0, 1))
    for number, data in enumerate(shared_out(RAW, *part)):

        def fault(handler: Handler, data: bytes = data) -> bool:
            handler.wfile.write(data)
            handler.close_connection = True
            return True

        with serving(fault) as cache:
            costs_a_warning(address(cache), tmp_path / str(number), data[:80])


@pytest.mark.parametrize("field", FIELDS)
def test_odd_manifests_of_a_cache(field: str, tmp_path: Path) -> None:
    data = b""

    def fault(handler: Handler) -> bool:
        handler.answer(200, data if "/manifests/" in handler.path else b"{}")
        return True

    with serving(fault) as cache:
        for number, value in enumerate(shared_out(VALUES, FIELDS.index(field) % 4, 4)):
            data = manifest(field, value)
            costs_a_warning(f"oci://{cache.url[7:]}/r", tmp_path / str(number), (field, value[:80]))


TOKENS = [
    *VALUES,
    *(f'{{"token": {value}}}' for value in VALUES),
    *(f'{{"access_token": {value}}}' for value in VALUES),
]


GOOD = {'{"token": "x"}', '{"access_token": "x"}'}
"""Valid answers of a token service, as JSON text: they contain a token, and the registry refuses that token.
The other answers of the test contain none."""


def test_odd_tokens(tmp_path: Path) -> None:
    data = ""

    def service(handler: Handler) -> bool:
        handler.answer(200, data.encode())
        return True

    with serving(service) as tokens:
        challenge = f'Bearer realm="{tokens.url}/token",service="s"'

        def registry(handler: Handler) -> bool:
            handler.answer(401, extra={"WWW-Authenticate": challenge})
            return True

        with serving(registry) as cache:
            for number, data in enumerate(
                [*TOKENS, "{" + " " * 100_000, json.dumps({"token": "x" * 70_000})]
            ):
                with Registry(parse(f"oci://{cache.url[7:]}/r")) as repository:
                    with pytest.raises(RemoteError) as error:
                        repository.manifest("v1")
                    words = "requires credentials" if data in GOOD else "its token service"
                    assert words in str(error.value), data[:80]
                if number % 10 == 0:
                    costs_a_warning(f"oci://{cache.url[7:]}/r", tmp_path / str(number), data[:80])


@pytest.mark.parametrize("size", ["1e999", "-1", "9" * 40, "9" * 5000, "null", "[]", "NaN"])
@pytest.mark.parametrize("kind", ["http", "directory"])
def test_odd_sizes_in_records(kind: str, size: str, tmp_path: Path) -> None:
    with serving() as cache:
        (tmp_path / "shared").mkdir()
        url = cache.url if kind == "http" else (tmp_path / "shared").as_uri()
        User(tmp_path / "one", url).run(ONE)
        if kind == "http":
            (name,) = cache.names("ac")
            cache.content[name] = cache.content[name].replace(b",1]]", f",{size}]]".encode(), 1)
        else:
            (path,) = (tmp_path / "shared" / "ac").iterdir()
            data = path.read_bytes().replace(b",1]]", f",{size}]]".encode(), 1)
            path.unlink()
            path.write_bytes(data)
        costs_a_warning(url, tmp_path / "two", size)


class Odd:
    """A transport whose methods raise an exception that no transport should raise."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def open(self, name: str, start: int = 0) -> Body | None:
        return Body(0, self.read, self.close)

    def read(self) -> bytes:
        raise self.error

    def size(self, name: str) -> int | None:
        raise self.error

    def put(self, name: str, source: object, size: int, *, new: bool = False) -> None:
        raise self.error

    def close(self) -> None:
        return


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        OverflowError(),
        TypeError(),
        KeyError("k"),
        RecursionError(),
        MemoryError(),
        EOFError(),
    ],
)
def test_whatever_a_transport_raises_is_a_fault_of_the_remote(error: Exception) -> None:
    transport = Bordered(Odd(error))
    words = f"its answer cannot be parsed \\({type(error).__name__}\\)"
    with pytest.raises(RemoteError, match=words):
        transport.size("cas/x")
    with pytest.raises(RemoteError, match=words):
        transport.put("cas/x", None, 0)  # type: ignore[arg-type]
    body = transport.open("cas/x")
    assert body is not None
    with pytest.raises(RemoteError, match=words), body:
        body.read()
    with pytest.raises(RemoteError, match="there: is no file"):
        Bordered(Odd(OSError(2, "is no file", "there"))).size("cas/x")
    with pytest.raises(KeyboardInterrupt):
        Bordered(Odd(KeyboardInterrupt())).size("cas/x")


@pytest.mark.parametrize("url", ["http://h:0", "http://a..b", "http://" + "a" * 300, "https://é.example/x"])
def test_addresses_that_no_client_can_use(url: str, tmp_path: Path) -> None:
    costs_a_warning(url, tmp_path / "one", url)
