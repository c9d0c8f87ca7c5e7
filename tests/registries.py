"""Starts a real OCI registry, Debian's docker-registry, for tests: open to all, with passwords, or with
tokens from a simulated token service."""

from __future__ import annotations

import base64
import datetime
import http.server
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.caches import answering, free_port, until_open

REGISTRY = shutil.which("docker-registry")
WITHOUT_REGISTRY = "docker-registry is not installed: apt-get install docker-registry"
LOGIN = "ann:s3cret"
_BCRYPT = "$2y$04$/cGGWxC6F01EGBeEmf5ce..GwZr8u9Go8lrSqiFuhDo3ogi96U3gu"
"""Hash, made by bcrypt, of the password "s3cret" in LOGIN, for the password file of a registry."""

_CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: false}}}}
storage:
  filesystem: {{rootdirectory: {home}/data}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}", secret: tests}}
{auth}
"""


@dataclass(frozen=True)
class Server:
    port: int
    home: Path

    def url(self, repository: str) -> str:
        return f"oci://127.0.0.1:{self.port}/{repository}"

    def get(self, path: str) -> bytes:
        """Returns the registry's response to an HTTP request that is sent without mlcbuild's client."""
        headers = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}/v2/{path}", headers=headers)
        with urllib.request.urlopen(asked) as answer:
            return bytes(answer.read())

    def requests(self) -> list[str]:
        """Returns "METHOD path" of every request that the registry has received, in order."""
        lines = (self.home / "log").read_text().splitlines()
        return [
            line.split('"')[1].removesuffix(" HTTP/1.1")
            for line in lines
            if '" HTTP/1.1' in line or 'HTTP/1.1"' in line
        ]


@contextmanager
def registry(home: Path, auth: str = "") -> Iterator[Server]:
    assert REGISTRY is not None
    home.mkdir(parents=True)
    port = free_port()
    (home / "users").write_text(f"{LOGIN.partition(':')[0]}:{_BCRYPT}\n")
    (home / "config.yml").write_text(_CONFIG.format(home=home, port=port, auth=auth.format(home=home)))
    with (home / "log").open("wb") as log:
        process = subprocess.Popen([REGISTRY, "serve", str(home / "config.yml")], stdout=log, stderr=log)
    try:
        until_open(port, process, home / "log")
        yield Server(port, home)
    finally:
        process.kill()
        process.wait()


PASSWORDS = "auth: {{htpasswd: {{realm: tests, path: {home}/users}}}}"


@dataclass
class Tokens:
    """A simulated token service for a registry. Clients that send the user name and password in LOGIN receive
    a token, which the registry accepts."""

    asked: list[dict[str, list[str]]] = field(default_factory=list)
    url: str = ""
    certificate: bytes = b""

    @property
    def auth(self) -> str:
        options = f"realm: {self.url}, service: tests, issuer: tests, rootcertbundle: {{home}}/../root.pem"
        return f"auth: {{{{token: {{{{{options}}}}}}}}}"


@contextmanager
def tokens(home: Path) -> Iterator[Tokens]:
    """Yields a running token service, whose certificate is written to `home`/root.pem. The registry's home
    directory must lie in `home`."""
    # Here: the tests of the runtime load this file, too, where that package may be missing.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
    from cryptography.x509.oid import NameOID

    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    (home / "root.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    chain = base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()
    actual = Tokens()

    def encoded(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    def token(scopes: list[str], user: str) -> str:
        access = []
        for scope in scopes:
            kind, repository, actions = scope.split(":")
            access.append({"type": kind, "name": repository, "actions": actions.split(",")})
        since = int(time.time())
        claims = {"iss": "tests", "aud": "tests", "sub": user, "iat": since, "nbf": since - 10, "jti": "1"}
        head = encoded(json.dumps({"typ": "JWT", "alg": "RS256", "x5c": [chain]}).encode())
        body = encoded(json.dumps({**claims, "exp": since + 600, "access": access}).encode())
        signed = key.sign(f"{head}.{body}".encode(), PKCS1v15(), hashes.SHA256())
        return f"{head}.{body}.{encoded(signed)}"

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            actual.asked.append(query)
            entries = "Basic " + base64.b64encode(LOGIN.encode()).decode()
            right = self.headers.get("Authorization") == entries
            data = json.dumps({"token": token(query.get("scope", []), "ann")}).encode() if right else b"{}"
            self.send_response(200 if right else 401)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            return

    with answering(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        actual.url = f"{url}/token"
        yield actual
