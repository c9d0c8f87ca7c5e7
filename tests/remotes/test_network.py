"""Tests of shared caches over TLS and through proxies: a real nginx with a certificate, and a small proxy
written for these tests."""

from __future__ import annotations

import base64
import datetime
import http.client
import http.server
import ipaddress
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.kinds import connect
from tests.caches import NGINX, WITHOUT_NGINX, answering, nginx, serving
from tests.remotes.users import BUILT, REUSED, User, statuses

needs_nginx = pytest.mark.skipif(NGINX is None, reason=WITHOUT_NGINX)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "ssl_cert_file"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@dataclass(frozen=True)
class Authority:
    """A certificate authority for tests, with the certificates that it has signed."""

    directory: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def file(self) -> Path:
        path = self.directory / "authority.pem"
        if not path.exists():
            path.write_bytes(self._certificate("authority", self.key, None, days=1))
        return path

    def sign(self, address: str = "127.0.0.1", days: int = 1) -> tuple[Path, Path]:
        """Signs a new certificate for the host `address`, and returns the paths of the certificate and of its
        key. days: how many days it is valid; negative for one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        place = self.directory / f"{address}-{days}.pem"
        place.write_bytes(self._certificate("server", key, address, days))
        place.with_suffix(".key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return place, place.with_suffix(".key")

    def _certificate(
        self, name: str, key: ec.EllipticCurvePrivateKey, address: str | None, days: int
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=10))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(address is None, None), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)
        )
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, False)
        else:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, True)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@needs_nginx
def test_a_certificate_of_an_own_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    with nginx(tmp_path / "nginx", tls=authority.sign()) as server:
        stranger = User(tmp_path / "1", server.url)
        assert statuses(stranger.run()) == BUILT
        (warning,) = stranger.warnings()
        assert "its certificate is not valid: unable to get local issuer certificate" in warning
        assert (
            "if an authority of your own has signed it, name that one's certificate in $SSL_CERT" in warning
        )
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert User(tmp_path / "2", server.url).run().not_uploaded == {}
        user = User(tmp_path / "3", server.url)
        assert statuses(user.run()) == REUSED and user.warnings() == []


@needs_nginx
@pytest.mark.parametrize(
    ("address", "days", "words"),
    [("127.0.0.2", 1, "IP address mismatch"), ("127.0.0.1", -1, "certificate has expired")],
)
def test_a_certificate_of_another_or_of_the_past_is_refused(
    address: str, days: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with nginx(tmp_path / "nginx", tls=authority.sign(address, days)) as server:
        user = User(tmp_path / "1", server.url)
        assert statuses(user.run()) == BUILT
        (warning,) = user.warnings()
        assert "its certificate is not valid: " in warning and words in warning


def test_certificates_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for name, words in (
        ("gone.pem", "which is not a file"),
        ("empty.pem", "holds no certificate in PEM form"),
    ):
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
        user = User(tmp_path / f"store-{name}", "https://127.0.0.1:1")
        assert statuses(user.run()) == BUILT
        (warning,) = user.warnings()
        assert f"$SSL_CERT_FILE names {tmp_path / name}, " in warning and words in warning


@dataclass
class Proxy:
    url: str
    asked: list[str] = field(default_factory=list)
    login: str = ""
    """User name and password, as user:password, that the proxy requires; "" for none."""


@contextmanager
def proxy(login: str = "") -> Iterator[Proxy]:
    """Yields a running proxy: it opens tunnels for CONNECT and forwards requests that name a whole URL."""
    actual = Proxy("", login=login)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def allowed(self) -> bool:
            actual.asked.append(f"{self.command} {self.path}")
            expected = "Basic " + base64.b64encode(actual.login.encode()).decode()
            if not actual.login or self.headers.get("Proxy-Authorization") == expected:
                return True
            self.send_response(407)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False

        def do_CONNECT(self) -> None:
            if not self.allowed():
                return
            host, _, port = self.path.partition(":")
            with socket.create_connection((host, int(port))) as other:
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(target=self.copy, args=(other, self.connection))
                back.start()
                self.copy(self.connection, other)
                back.join()
            self.close_connection = True

        def copy(self, source: socket.socket, target: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        def forward(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self.allowed():
                return
            parts = urlsplit(self.path)
            connection = http.client.HTTPConnection(parts.netloc)
            connection.request(self.command, parts.path, data, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name in ("Content-Range", "ETag"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", answer.headers.get("Content-Length", str(len(content))))
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_GET = do_HEAD = do_PUT = do_MKCOL = forward  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            return

    with answering(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as actual.url:
        yield actual


@needs_nginx
def test_https_goes_through_the_tunnel_of_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with nginx(tmp_path / "nginx", tls=authority.sign()) as server, proxy("ann:s3 cret") as between:
        monkeypatch.setenv("HTTPS_PROXY", between.url.replace("//", "//ann:s3%20cret@"))
        assert User(tmp_path / "1", server.url).run().not_uploaded == {}
        assert set(between.asked) == {f"CONNECT {server.url[8:]}"}
        between.login = "ann:other"
        refused = User(tmp_path / "2", server.url)
        assert statuses(refused.run()) == BUILT
        (warning,) = refused.warnings()
        assert "the proxy 127.0.0.1: it refuses the connection (status 407)" in warning
        assert "s3" not in warning
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert statuses(User(tmp_path / "3", server.url).run()) == REUSED


@pytest.mark.parametrize("kind", ["url", "bucket"])
def test_http_and_buckets_go_through_a_proxy(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_login: None
) -> None:
    with serving() as cache, proxy("ann:secret") as between:
        monkeypatch.setenv("http_proxy", between.url.replace("//", "//ann:secret@"))
        assert User(tmp_path / "1", getattr(cache, kind)).run().not_uploaded == {}
        user = User(tmp_path / "2", getattr(cache, kind))
        assert statuses(user.run()) == REUSED and user.warnings() == []
        within = "/bucket/" if kind == "bucket" else "/"
        assert all(f" {cache.url}{within}" in asked for asked in between.asked)
        assert any(asked.startswith("GET") for asked in between.asked)


@needs_nginx
def test_a_bucket_behind_a_certificate_of_an_own_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_login: None
) -> None:
    authority = Authority(tmp_path)
    with nginx(tmp_path / "nginx", tls=authority.sign()) as server:
        bucket = f"s3://bucket?endpoint={server.url}"
        with pytest.raises(RemoteError, match="its certificate is not valid: unable to get local issuer"):
            connect(bucket).size("cas/x")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert connect(bucket).size("cas/x") is None


def test_a_proxy_that_is_down_or_unknown_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy() as gone:
        pass
    cases = {
        gone.url: "the proxy 127.0.0.1: Connection refused",
        "socks5://127.0.0.1:1": "the proxy in the environment must be http://host:port",
    }
    for number, (url, words) in enumerate(cases.items()):
        monkeypatch.setenv("http_proxy", url)
        user = User(tmp_path / str(number), "http://127.0.0.1:1")
        assert statuses(user.run()) == BUILT
        (warning,) = user.warnings()
        assert words in warning
