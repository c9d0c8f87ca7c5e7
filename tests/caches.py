"""Starts servers of shared caches for tests: nginx with WebDAV, and a server of our own that fails or sends
wrong answers on request."""

from __future__ import annotations

import http.server
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
WITHOUT_NGINX = "nginx is not installed: apt-get install nginx-light (it has the WebDAV module)"

_CONFIG = """\
daemon off;
{user}
worker_processes 1;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log {home}/access.log;
  client_body_temp_path {home}/body;
  proxy_temp_path {home}/t1; fastcgi_temp_path {home}/t2; uwsgi_temp_path {home}/t3; scgi_temp_path {home}/t4;
  sendfile on;
  server {{
    listen 127.0.0.1:{port}{tls};
    root {home}/root;
    client_max_body_size 0;
    {auth}
    {locations}
  }}
}}
"""
_LOCATIONS = """\
location ~ "^/(ac|cas)/[0-9a-f]{64}$" {
      dav_methods PUT; create_full_put_path on; dav_access user:rw group:r all:r;
    }"""


@dataclass(frozen=True)
class Nginx:
    url: str
    root: Path
    log: Path
    """File to which nginx writes the method, path and status of each request."""


@contextmanager
def nginx(
    home: Path,
    password_file: str = "",
    tls: tuple[Path, Path] | None = None,
    locations: str = _LOCATIONS,
) -> Iterator[Nginx]:
    """Yields a running nginx whose configuration `nginx -t` accepts. `password_file`: lines of
    user:{PLAIN}password for basic authentication; `tls`: certificate and key, then it speaks https;
    `locations`: the directives of its `server` block."""
    assert NGINX is not None
    (home / "root").mkdir(parents=True)
    auth = ""
    if password_file:
        (home / "users").write_text(password_file)
        auth = f"auth_basic cache; auth_basic_user_file {home}/users;"
    if tls is not None:
        auth += f" ssl_certificate {tls[0]}; ssl_certificate_key {tls[1]};"
    port = free_port()
    user = "user root;" if os.geteuid() == 0 else ""
    ssl = " ssl" if tls else ""
    (home / "nginx.conf").write_text(
        _CONFIG.format(home=home, port=port, auth=auth, user=user, tls=ssl, locations=locations)
    )
    command = [NGINX, "-e", str(home / "error.log"), "-c", str(home / "nginx.conf"), "-p", str(home)]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_open(port, process, home / "error.log")
        yield Nginx(f"http{'s' if tls else ''}://127.0.0.1:{port}", home / "root", home / "access.log")
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """Returns a TCP port below 32768 that is free: systems give ports from 32768 on to clients, so it stays
    free until a server binds it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as actual, suppress(OSError):
            actual.bind(("127.0.0.1", port))
            return port


def until_open(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until a server accepts connections on a port, as long as that may take on a loaded machine."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    raise AssertionError(log.read_text())


Fault = Callable[["Handler"], bool]
"""Function that may answer a request in place of the server: it returns True if it has answered, False for
the usual answer."""


def usual(handler: Handler) -> bool:
    return False


@dataclass
class Cache:
    """A shared cache in memory behind an HTTP server, with a record of the requests that it received."""

    url: str = ""
    content: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    clients: set[int] = field(default_factory=set)
    """Port numbers of the clients that have sent requests."""
    fault: Fault = usual

    @property
    def bucket(self) -> str:
        """Returns the s3:// URL of the simulated shared cache. It has an HTTP URL, too: its server accepts
        both protocols, because every object is transferred by a single request."""
        return f"s3://bucket?endpoint={self.url}"

    def names(self, kind: str) -> list[str]:
        return sorted(name for name in self.content if name.startswith(f"/{kind}/"))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cache: Cache

    def _handle(self) -> None:
        if self.path.startswith("/bucket/"):  # as S3 names it, with a signature
            self.path = self.path.removeprefix("/bucket").partition("?")[0]
        self.cache.clients.add(self.client_address[1])
        self.cache.requests.append((self.command, self.path))
        self.cache.headers.append({name.title(): value for name, value in self.headers.items()})
        if self.cache.fault(self):
            return
        if self.command == "PUT":
            self.cache.content[self.path] = self.body()
            self.answer(201)
            return
        data = self.cache.content.get(self.path)
        if data is None:
            self.answer(404, b"no")
            return
        expected = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if expected is None:
            self.answer(200, data)
            return
        start, end = int(expected[1]), min(int(expected[2] or len(data)), len(data) - 1)
        if start >= len(data):
            self.answer(416)
            return
        extra = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
        self.answer(206, data[start : end + 1], extra)

    do_GET = do_HEAD = do_PUT = do_PATCH = do_POST = do_MKCOL = _handle  # noqa: N815

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(
        self, status: int, data: bytes = b"", extra: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in {"ETag": '"1"', "Date": self.date_time_string(), **(extra or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        if length is not None and length != len(data):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        return


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores errors of connections, because clients in these tests disconnect early."""


@contextmanager
def answering(server: http.server.ThreadingHTTPServer) -> Iterator[str]:
    """Runs a server in a thread, and yields its URL."""
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving(fault: Fault | None = None) -> Iterator[Cache]:
    cache = Cache()
    if fault is not None:
        cache.fault = fault
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"cache": cache}))
    with answering(server) as cache.url:
        yield cache
