"""Tests that a local server refuses requests from web pages of other origins and requests for other host
names."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from . import shared
from .attacks import HOST, answer, connect, post
from .shared import Server


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "0.0.0.0"}, 403),
        ({"Host": "[::2]:80"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "LOCALHOST."}, 200),
        ({"Host": "chat.localhost"}, 200),
        ({"Host": "127.8.9.1"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1", "Host": "localhost:2"}, 403),
        ({"Origin": "http://localhost:2", "Host": "localhost:2"}, 200),
        ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 403),
    ],
)
def test_pages_of_other_sites_may_not_call(server: Server, headers: dict[str, str], status: int) -> None:
    response = post(server, "/tokenize", {"prompt": "a"}, **headers)
    assert response.status_code == status, response.text
    if status == 403:
        assert re.search("--allowed-host|--cors", response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost\r\nhOST: localhost\r\n", b"400"),
        (b"HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: local host\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost, evil.example\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: a@localhost\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost/\xe9\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost:x\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: [::1\r\n", b"400"),
        (b"HTTP/1.0\r\n", b"200"),
        (b"HTTP/1.1\r\nHost: [::1]:8000\r\n", b"200"),
        (b"HTTP/1.1\r\nHost: LOCALHOST:\r\n", b"200"),
    ],
)
def test_a_request_names_one_host(server: Server, head: bytes, status: bytes) -> None:
    """Checks that requests with a missing, repeated or invalid Host field are refused (RFC 9112, 3.2);
    HTTP/1.0 does not require the field."""
    with connect(server) as client:
        client.sendall(b"GET /health " + head + b"Connection: close\r\n\r\n")
        reply = answer(client)
    assert reply.split(b" ")[1] == status, reply[:200]
    if status == b"400":
        assert b"Host" in reply.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://LOCALHOST/health", b"200"),
        (b"http://evil.example/health", b"400"),
        (b"http://a@localhost/health", b"400"),
        (b"https://localhost:1/health", b"400"),
        (b"/http://evil.example/", b"404"),
    ],
)
def test_a_url_in_the_request_line_names_the_same_host(server: Server, target: bytes, status: bytes) -> None:
    with connect(server) as client:
        client.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reply = answer(client)
    assert reply.split(b" ")[1] == status, reply[:200]
    assert (b"name different hosts" in reply) == (status == b"400")


def test_options_allow_other_names_and_pages(toy_bundle: Path) -> None:
    options = ("--allowed-host", "box.example", "--cors", "http://page.example")
    with shared.serving(toy_bundle, *options) as server:
        for headers, status in (
            ({"Host": "box.example:80"}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Origin": "http://page.example"}, 200),
            ({"Origin": "http://evil.example"}, 403),
        ):
            assert post(server, "/tokenize", {"prompt": "a"}, **headers).status_code == status
    with shared.serving(toy_bundle, "--api-key", "k") as server:
        headers = {"Host": "evil.example", "Origin": "http://evil.example", "Authorization": "Bearer k"}
        assert post(server, "/tokenize", {"prompt": "a"}, **headers).status_code == 200
        with connect(server) as client:  # the body of a request without a key is not read
            client.sendall(b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: 100000000\r\n\r\n")
            reply = answer(client)
        assert reply.startswith(b"HTTP/1.1 401") and b"connection: close" in reply.lower()


def test_nothing_redirects_to_the_clients_host(server: Server) -> None:
    for path in ("/health/", "/v1/models/", "/tokenize/", "//evil.example/"):
        response = httpx.get(f"{server.url}{path}", follow_redirects=False, verify=shared.PLAIN)
        assert response.status_code in (404, 405) and "location" not in response.headers
