"""Tests of the HTTP client: retries, proxies and certificates, and its error messages."""

from __future__ import annotations

import http.server
import io
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import client
from mlcbuild.remotes.client import Client, status_words
from mlcbuild.remotes.transport import SlowError
from tests.caches import answering


class Script:
    """A simulated HTTP server. It answers requests with the statuses in the list `statuses`, one after the
    other, and when the list is empty with 200."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.headers: dict[str, str] = {}
        self.content = b"content"
        self.delay = 0.0
        self.requests: list[tuple[str, str, bytes]] = []
        self.connections: set[object] = set()
        self.url = ""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Yields a simulated HTTP server, which a test programs with statuses and other settings. During the
    test, clients make no pauses between retries and use no proxy."""
    server = Script()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.requests.append((self.command, self.path, body))
            server.connections.add(self.client_address)
            time.sleep(server.delay)
            self.send_response(server.statuses.pop(0) if server.statuses else 200)
            for name, value in {"Content-Length": str(len(server.content)), **server.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(BrokenPipeError):  # a client that has waited long enough
                self.wfile.write(server.content)

        do_GET = do_PUT = do_PATCH = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            return

    monkeypatch.setattr(client, "PAUSES", (0.0, 0.0))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server.url:
        yield server


@pytest.mark.parametrize("status", sorted(client._BUSY))
def test_busy_servers_are_asked_three_times(script: Script, status: int) -> None:
    http_client = Client(script.url)
    script.statuses = [status, status]
    assert http_client.end(http_client.ask("GET", "/a?b=%20c")) == b"content"
    assert script.requests == [("GET", "/a?b=%20c", b"")] * 3
    script.statuses = [status] * 3
    response = http_client.ask("GET", "/")
    http_client.discard(response)
    assert response.status == status
    http_client.close()


def test_a_body_is_sent_again_from_its_beginning(script: Script) -> None:
    client = Client(script.url)
    script.statuses = [503]
    client.end(client.ask("PUT", "/x", {"Content-Length": "4"}, io.BytesIO(b"body")))
    assert script.requests == [("PUT", "/x", b"body")] * 2
    client.close()


def test_a_part_of_an_upload_is_never_repeated(script: Script) -> None:
    client = Client(script.url)
    script.statuses = [503]
    response = client.ask("PATCH", "/x", {"Content-Length": "4"}, io.BytesIO(b"body"))
    client.discard(response)
    assert response.status == 503 and len(script.requests) == 1
    client.close()


def test_connections_are_used_again(script: Script) -> None:
    client = Client(script.url)
    for _ in range(3):
        client.end(client.ask("GET", "/"))
    assert len(script.connections) == 1
    client.discard(client.ask("GET", "/"))
    client.end(client.ask("GET", "/"))
    assert len(script.connections) == 2, "what was not read to its end cannot be used again"
    client.close()


def test_redirects_are_not_followed(script: Script) -> None:
    client = Client(script.url)
    script.statuses, script.headers = [302], {"Location": f"{script.url}/other"}
    response = client.ask("GET", "/")
    client.end(response)
    assert response.status == 302 and len(script.requests) == 1
    client.close()


def test_a_silent_server_is_asked_once(script: Script) -> None:
    script.delay = 1.0
    client = Client(script.url, timeout=0.2)
    with pytest.raises(SlowError, match=r"^it does not answer$"):
        client.ask("GET", "/")
    client.close()
    assert len(script.requests) == 1


def test_bodies_begin_where_they_were_asked_for(script: Script) -> None:
    client = Client(script.url)
    script.statuses, script.headers = [206], {"Content-Range": "bytes 3-9/10"}
    with client.body(client.ask("GET", "/"), 3) as body:
        assert body.start == 3 and bytes(body.read()) == b"content" and body.read() == b""
    script.statuses = [206]
    with pytest.raises(RemoteError, match=r"^it sent another range than the requested one$"):
        client.body(client.ask("GET", "/"), 4)
    script.headers = {}
    with client.body(client.ask("GET", "/"), 5) as body:
        assert body.start == 0, "a whole object in place of a range"
    client.close()


def test_a_body_that_ends_early_is_no_body(script: Script) -> None:
    client = Client(script.url)
    script.headers = {"Content-Length": "100", "Connection": "close"}
    with (
        pytest.raises(RemoteError, match=r"^its answer ended early$"),
        client.body(client.ask("GET", "/"), 0) as body,
    ):
        while body.read():
            pass
    client.close()


def test_a_closed_client_says_why() -> None:
    client = Client("http://127.0.0.1:9")
    client.close()
    with pytest.raises(RemoteError, match=r"^the run ends$"):
        client.ask("GET", "/")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "", "it answered with status 404"),
        (400, "NAME_INVALID", "it answered with status 400, NAME_INVALID"),
        (301, "", "it redirects clients (status 301): write the final address into the recipe"),
        (507, "", "it is full (status 507)"),
        (413, "TooLarge", "it is full (status 413, TooLarge)"),
    ],
)
def test_words_for_statuses(status: int, code: str, words: str) -> None:
    assert status_words(status, code) == words


def proxy(monkeypatch: pytest.MonkeyPatch, setting: str, url: str = "https://host/path") -> str | None:
    """Returns the address of the proxy that a client uses for `url`; None for no proxy. setting: value of the
    environment variable https_proxy."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("https_proxy", setting)
    monkeypatch.setenv("no_proxy", "inner.example,127.0.0.1")
    chosen = Client(url)._proxy
    return None if chosen is None else client._address(chosen)


@pytest.mark.parametrize("setting", ["http://proxy:3128", "proxy:3128", "http://me:pass%40word@proxy:3128/"])
def test_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    assert proxy(monkeypatch, setting) == "http://proxy:3128"
    assert proxy(monkeypatch, setting, "http://host") is None
    assert proxy(monkeypatch, setting, "https://user:secret@inner.example/x") is None


@pytest.mark.parametrize(
    "setting",
    ["socks5://proxy:1", "https://proxy", "http://", "http://proxy:0", "http://[::1", "http://\udcff@proxy"],
)
def test_other_proxies_are_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    with pytest.raises(RemoteError, match=r"^the proxy in the environment must be http://host:port$"):
        proxy(monkeypatch, setting)


def test_the_login_of_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy(monkeypatch, "http://me:pass%40word@proxy:3128")
    chosen = Client("https://host")._proxy
    assert chosen is not None
    assert client._login(chosen) == {"Proxy-Authorization": "Basic bWU6cGFzc0B3b3Jk"}


def test_a_file_of_certificates_must_hold_some(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, words in (
        ("nothing", "which is not a file"),
        ("text", "which holds no certificate in PEM form"),
    ):
        (tmp_path / "text").write_text("hello")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
        with pytest.raises(RemoteError, match=words):
            Client("https://host")
