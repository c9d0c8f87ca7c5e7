"""Answers that no server should give, field by field: each costs one warning that names the remote.

What is tried is not a list of known faults, but odd values in every header and JSON field that is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from mlcbuild.bundles.publish.transfer_bundle import pull
from mlcbuild.errors import PublishError, RemoteError
from mlcbuild.remotes import client, s3
from mlcbuild.remotes.oci_reference import parse
from mlcbuild.remotes.registry import Registry
from mlcbuild.remotes.transport import Body, Bordered
from tests.caches import Cache, Fault, Handler, serving
from tests.remotes.users import CHAIN, User, statuses, step

pytestmark = pytest.mark.usefixtures("plain")
EVERY = "MLCBUILD_TEST_EVERY" in os.environ
PROTOCOLS = ("http", "s3", "oci")
Value = TypeVar("Value")
DIGEST = "sha256:" + hashlib.sha256(b"{}").hexdigest()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (client, s3):
        monkeypatch.setattr(module, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=PROTOCOLS)
def address(request: pytest.FixtureRequest) -> Callable[[Cache], str]:
    if request.param == "http":
        return lambda cache: cache.url
    if request.param == "oci":
        return lambda cache: f"oci://{cache.url[7:]}/r"
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'mlcbuild[s3]'")
    request.getfixturevalue("s3_login")
    return lambda cache: cache.bucket


NUMBERS = [
    "",
    "-1",
    "+5",
    "1e999",
    "1.5",
    "NaN",
    "0x10",
    "1_0",
    "9" * 40,
    "9" * 5000,
    "²",
    "٣",
    "é",
    "1,2",
    "5 5",
]
RANGES = [
    *("", "x", "bytes", "bytes 0", "bytes */5", "bytes 5-1/9", "bytes -1-5/9", "items 0-4/5", "bytes ٣-4/5"),
    *(f"bytes {number}-{number}/{number}" for number in NUMBERS),
    *(f"bytes 0-{number}/{number}" for number in NUMBERS),
]
ADDRESSES = [
    *(
        "",
        "x",
        "//",
        "///",
        "//[",
        "https://[",
        "https://[::1",
        "http://[::1]:x/",
        "https://h:99999/",
        "http://:0/",
    ),
    *(
        "http://h:-1/",
        "http:///x",
        "http://é/",
        "http://\u2100.example/",
        "https://u:p@h/",
        "file:///etc/passwd",
    ),
    *(
        "javascript:1",
        "data:,x",
        "http://127.0.0.1:1/",
        "http://" + "a" * 300 + "/",
        "http://a..b/",
        "?",
        "#",
        "%",
    ),
    *(
        "http://xn--a/",
        "http://127.0.0.1:1/\x7f",
        "/\x01",
        "http://" + "[" * 99,
        "\\\\h\\x",
        "http:/x",
        "é",
        "\t",
    ),
]
CHALLENGES = [
    *("", "Basic", "Bearer", "é", "Bearer realm", 'Bearer realm="', 'Negotiate realm="x"', 'Bearer realm=""'),
    *(f'Bearer realm="{address}",service="s"' for address in ADDRESSES),
    'Bearer realm="http://127.0.0.1:1/",service="é\x01"',
]
DATES = ["", "x", "Thu, 99 Jan 99999 99:99:99 GMT", "Thu, 01 Jan 0000 00:00:00 GMT", "-1", "é", "9" * 5000]
HEADERS: dict[tuple[int, str], list[str]] = {
    (200, "Content-Length"): NUMBERS,
    (200, "Transfer-Encoding"): ["x", "chunked, x", "gzip", "é"],
    (200, "Docker-Content-Digest"): ["", "x", "sha256:é", "sha256:" + "0" * 64, "md5:0"],
    (200, "ETag"): ["", "W/x", "é", '"' * 500, "\x01"],
    (206, "Content-Range"): RANGES,
    (302, "Location"): ADDRESSES,
    (307, "Location"): ADDRESSES,
    (401, "WWW-Authenticate"): CHALLENGES,
    (403, "Date"): DATES,
    (403, "x-amz-bucket-region"): ["", "é", "x" * 500, "eu\x1b[31m"],
    (429, "Retry-After"): ["99999999", "-1", "x", "Thu, 01 Jan 2999 00:00:00 GMT"],
}


def saying(status: int, name: str, value: str, body: bytes = b"{}") -> Fault:
    """Returns the same answer to everything, with one header whose value is sent as UTF-8, whatever it is."""

    def fault(handler: Handler) -> bool:
        lines = [f"HTTP/1.1 {status} x", f"{name}: {value}"]
        if name not in ("Content-Length", "Transfer-Encoding"):
            lines.append(f"Content-Length: {len(body)}")
        handler.wfile.write("\r\n".join([*lines, "", ""]).encode() + body)
        handler.close_connection = True
        return True

    return fault


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
    """Returns the share of odd values that one of several tests tries. Together they try every value; with
    MLCBUILD_TEST_EVERY each test tries all.
    """
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


def uploading(value: str) -> Fault:
    """Returns a registry that holds nothing, takes everything, and names an odd place to send to."""

    def fault(handler: Handler) -> bool:
        body = handler.body()
        if handler.command in ("GET", "HEAD"):
            handler.answer(404)
            return True
        head = f"HTTP/1.1 {201 if handler.command == 'PUT' else 202} x\r\nContent-Length: 0\r\n"
        handler.wfile.write(f"{head}Location: {value}\r\nRange: {value}\r\n\r\n".encode())
        handler.close_connection = bool(body)
        return True

    return fault


def test_odd_places_to_send_to(tmp_path: Path) -> None:
    with serving() as cache:
        for number, value in enumerate([*ADDRESSES, *NUMBERS, "/v2/\x01", "/v2/é", "/v2/" + "x" * 60_000]):
            cache.fault = uploading(value)
            costs_a_warning(f"oci://{cache.url[7:]}/r", tmp_path / str(number), value[:80])


def test_a_bundle_is_not_published_to_odd_places(
    tiny_bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlcbuild.cli import main

    bundle = tiny_bundles / "dist" / "tiny-q4f16_1-host"
    with serving() as cache:
        url = f"oci://{cache.url[7:]}/r:v1"
        for value in ADDRESSES:
            cache.fault = uploading(value)
            assert main(["publish", str(bundle), "--to", url]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"failed  publish/{bundle.name}: {url}: "), (value, said)
            assert said.count("\n") == 1 and "defect" not in said and len(said) < 600


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


def test_odd_bytes(address: Callable[[Cache], str], tmp_path: Path) -> None:
    for number, data in enumerate(RAW):

        def fault(handler: Handler, data: bytes = data) -> bool:
            handler.wfile.write(data)
            handler.close_connection = True
            return True

        with serving(fault) as cache:
            costs_a_warning(address(cache), tmp_path / str(number), data[:80])


# JSON. Values are written as they stand, since several are no values of Python's.
VALUES = [
    *(
        "null",
        "true",
        "-1",
        "0",
        "7",
        "1.5",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "1" + "0" * 30,
        "9" * 5000,
    ),
    *(
        '""',
        '"x"',
        '"é"',
        r'"\ud800"',
        r'"a\u0000b"',
        '"sha256:é"',
        r'"sha256:\ud800"',
        "[]",
        "[[]]",
        "[1]",
        "{}",
    ),
    *('{"a": 1}', "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 100_000, "x", ""),
]
FIELDS = ("document", "layers", "layer", "mediaType", "digest", "size", "annotations", "annotation", "title")


def manifest(field: str, value: str) -> bytes:
    """Returns a manifest of one layer, with one part of it replaced."""
    title = value if field == "title" else '"bundle.json"'
    parts = {
        "mediaType": '"x"',
        "digest": f'"{DIGEST}"',
        "size": "2",
        "annotations": f'{{"org.opencontainers.image.title": {title}'
        + (f', "x": {value}}}' if field == "annotation" else "}"),
    }
    if field in parts:
        parts[field] = value
    layer = "{" + ", ".join(f'"{name}": {part}' for name, part in parts.items()) + "}"
    layers = value if field == "layers" else f"[{value if field == 'layer' else layer}]"
    return (value if field == "document" else f'{{"layers": {layers}}}').encode()


@pytest.mark.parametrize("field", FIELDS)
def test_odd_manifests_of_a_cache(field: str, tmp_path: Path) -> None:
    data = b""

    def fault(handler: Handler) -> bool:
        handler.answer(200, data if "/manifests/" in handler.path else b"{}")
        return True

    with serving(fault) as cache:
        for number, value in enumerate(shared_out(VALUES, FIELDS.index(field) % 2, 2)):
            data = manifest(field, value)
            costs_a_warning(f"oci://{cache.url[7:]}/r", tmp_path / str(number), (field, value[:80]))


@pytest.mark.parametrize("field", FIELDS)
def test_odd_manifests_of_a_bundle(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`mlcbuild pull`: one sentence, exit code 1, never a defect, and nothing is left."""
    from mlcbuild.cli import main

    data = b""

    def fault(handler: Handler) -> bool:
        handler.answer(200, data if "/manifests/" in handler.path else b"{}")
        return True

    with serving(fault) as cache:
        for number, value in enumerate(VALUES):
            data = manifest(field, value)
            url, out = f"oci://{cache.url[7:]}/r:v1", tmp_path / str(number)
            assert main(["pull", url, str(out)]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"{url}: ") and said.count("\n") == 1, (value[:80], said)
            assert "defect" not in said and len(said) < 600 and not out.exists()


@pytest.mark.parametrize(("status", "name"), [key for key in HEADERS if key[1] != "x-amz-bucket-region"])
def test_odd_headers_of_a_bundle(
    status: int, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlcbuild.cli import main

    with serving() as cache:
        for number, value in enumerate(HEADERS[status, name]):
            odd = saying(status, name, value)

            def fault(handler: Handler, odd: Fault = odd) -> bool:
                if "/blobs/" in handler.path or status != 206:
                    return odd(handler)
                handler.answer(200, manifest("", ""))
                return True

            cache.fault = fault
            url = f"oci://{cache.url[7:]}/r:v1"
            assert main(["pull", url, str(tmp_path / str(number))]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"{url}: ") and said.count("\n") == 1, (value[:80], said)
            assert "defect" not in said and len(said) < 600


TOKENS = [
    *VALUES,
    *(f'{{"token": {value}}}' for value in VALUES),
    *(f'{{"access_token": {value}}}' for value in VALUES),
]
GOOD = {'{"token": "x"}', '{"access_token": "x"}'}
"""Answers that hold a token, though the registry does not accept it."""


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


# The border


class Odd:
    """A transport that raises what no transport should."""

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


# Bundles


def layer(title: str, data: bytes, **changes: object) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    notes = {"org.opencontainers.image.title": title}
    return {"mediaType": "x", "digest": digest, "size": len(data), "annotations": notes, **changes}


BUNDLES: dict[str, tuple[list[dict[str, object]], str]] = {
    "size too large": (
        [layer("bundle.json", b"abcd", size=10**4)],
        "bundle.json has 4 bytes where its manifest states",
    ),
    "size too small": (
        [layer("bundle.json", b"abcd", size=2)],
        "bundle.json has 4 bytes where its manifest states 2",
    ),
    "size of a whole disk": (
        [layer("bundle.json", b"abcd", size=10**17)],
        "its manifest states 1000000000000000",
    ),
    "below a file": (
        [layer("bundle.json", b"a"), layer("bundle.json/x", b"b")],
        "'bundle.json' as a file and as a",
    ),
    "twice": ([layer("bundle.json", b"a"), layer("bundle.json", b"b")], "its manifest names a file twice"),
    "above": ([layer("bundle.json", b"a"), layer("../x", b"b")], "the file name '../x' is no plain path"),
    "absolute": ([layer("bundle.json", b"a"), layer("/x", b"b")], "the file name '/x' is no plain path"),
    "escape": ([layer("bundle.json", b"a"), layer("\x1b[31m", b"b")], "'\\x1b[31m' is no plain path"),
    "surrogate": ([layer("bundle.json", b"a"), layer("\ud800", b"b")], "'\\ud800' is no plain path"),
    "long": ([layer("bundle.json", b"a"), layer("x" * 300, b"b")], "is longer than 255 bytes"),
    "deep": ([layer("bundle.json", b"a"), layer("x/" * 3000 + "x", b"b")], "File name too long"),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_odd_bundles(name: str, tmp_path: Path) -> None:
    layers, words = BUNDLES[name]
    contents = {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in (b"abcd", b"a", b"b")}

    def fault(handler: Handler) -> bool:
        data = contents.get(handler.path.rpartition("/")[2], json.dumps({"layers": layers}).encode())
        start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
        extra = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        handler.answer(206 if start else 200, data[start:], extra)
        return True

    with serving(fault) as cache:
        url = f"oci://{cache.url[7:]}/r:v1"
        for _ in range(2):  # what the first left is used by the second
            with pytest.raises(PublishError) as error:
                pull(url, tmp_path / "out")
            assert str(error.value).startswith(f"{url}: ") and words in str(error.value), str(error.value)[
                :300
            ]
            assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()
