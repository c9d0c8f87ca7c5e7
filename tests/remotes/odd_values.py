"""Values for headers, JSON fields and addresses that a correct server never sends, and functions that make a
simulated server send them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mlcbuild.remotes import client, s3
from tests.caches import Fault, Handler

PROTOCOLS = ("http", "s3", "oci")


DIGEST = "sha256:" + hashlib.sha256(b"{}").hexdigest()


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
    """Returns a function that makes a simulated server send the same answer to every request. The header
    `name` has the value `value`, sent as UTF-8 even if it is invalid."""

    def fault(handler: Handler) -> bool:
        lines = [f"HTTP/1.1 {status} x", f"{name}: {value}"]
        if name not in ("Content-Length", "Transfer-Encoding"):
            lines.append(f"Content-Length: {len(body)}")
        handler.wfile.write("\r\n".join([*lines, "", ""]).encode() + body)
        handler.close_connection = True
        return True

    return fault


def uploading(value: str) -> Fault:
    """Returns a function that makes a simulated server act as an empty registry: it stores nothing, accepts
    every upload, and returns `value` as the address and the range of the upload."""

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
    """Returns the JSON of a manifest with one layer, in which the field `field` has the JSON value
    `value`."""
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


def layer(title: str, data: bytes, **changes: object) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    notes = {"org.opencontainers.image.title": title}
    return {"mediaType": "x", "digest": digest, "size": len(data), "annotations": notes, **changes}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes remotes retry at once, and hides credentials of whoever runs the tests."""
    for module in (client, s3):
        monkeypatch.setattr(module, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
