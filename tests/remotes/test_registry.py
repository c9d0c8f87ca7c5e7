"""Tests of what is special about OCI registries. test_remotes has the tests that all kinds of remotes
share."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import parse_qs

import pytest
from urllib3.response import BaseHTTPResponse

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import auth, fault, registry
from mlcbuild.remotes.oci_reference import parse
from mlcbuild.remotes.registry import Registry
from tests import registries
from tests.caches import Handler, serving
from tests.registries import LOGIN, Server
from tests.remotes.users import BUILT, User, statuses

needs_registry = pytest.mark.skipif(registries.REGISTRY is None, reason=registries.WITHOUT_REGISTRY)


@pytest.fixture(autouse=True)
def no_logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_a_cache_is_made_of_artifacts_that_a_registry_understands(
    registry_server: Server, tmp_path: Path
) -> None:
    repository = f"team/{secrets.token_hex(8)}"
    result = User(tmp_path / "one", registry_server.url(repository)).run()
    tags = json.loads(registry_server.get(f"{repository}/tags/list"))["tags"]
    assert len(tags) == 6
    for step in result.steps:
        assert step.record is not None and f"ac-{step.record.key}" in tags
        (entry,) = step.record.files
        manifest = json.loads(registry_server.get(f"{repository}/manifests/cas-{entry.digest}"))
        assert manifest["artifactType"] == "application/vnd.mlcbuild.cache.v1"
        (layer,) = manifest["layers"]
        data = registry_server.get(f"{repository}/blobs/{layer['digest']}")
        assert digest_of(data) == layer["digest"] and len(data) == layer["size"] == entry.size


def test_large_blobs_go_in_pieces(registry_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PIECE", 1_000_000)
    data = os.urandom(3_500_000)
    with Registry(parse(registry_server.url(f"r{secrets.token_hex(8)}"))) as repository:
        digest = repository.send(io.BytesIO(data), len(data))
        assert digest == digest_of(data) and repository.has(digest)
        body = repository.blob(digest, 3_499_990)
        assert body is not None
        with body:
            assert body.start == 3_499_990 and body.read() == data[-10:]
        assert not repository.has(digest_of(b"other")) and repository.blob(digest_of(b"other")) is None


def test_a_blob_is_mounted_from_another_repository(registry_server: Server) -> None:
    first, second = (f"r{secrets.token_hex(8)}" for _ in range(2))
    data = secrets.token_bytes(1000)
    with Registry(parse(registry_server.url(first))) as one:
        digest = one.send(io.BytesIO(data), len(data))
    with Registry(parse(registry_server.url(second))) as other:
        assert not other.has(digest) and other.mount(digest, first) and other.has(digest)
        assert not other.mount(digest_of(b"nothing"), first)


def test_a_registry_may_accept_blobs_in_one_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks uploads to Google's registries, which refuse a second part, and whose uploads have addresses of
    other forms."""
    place, received = "/artifacts-uploads/namespaces/p/repositories/r/uploads/AF?x=1", list[bytes]()

    def single(handler: Handler) -> bool:
        received.append(handler.body())
        if handler.command == "PATCH" and (len(received) > 2 or "Content-Range" in handler.headers):
            handler.answer(400)
        else:
            assert handler.command == "POST" or handler.path.startswith(place)
            handler.answer(201 if handler.command == "PUT" else 202, extra={"Location": place})
        return True

    monkeypatch.setattr(registry, "PIECE", 1000)
    monkeypatch.setattr(registry, "_WHOLE", (".0.1",))
    with serving(single) as server, Registry(parse(f"oci://{server.url[7:]}/r")) as repository:
        assert repository.send(io.BytesIO(b"x" * 2500), 2500) == digest_of(b"x" * 2500)
    assert received == [b"", b"x" * 2500, b""]


class Uploads:
    """A simulated registry that reads at most `most` bytes of each upload request and closes the connection
    if the request has more, so that a client must continue its upload."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.data = b""
        self.pieces: list[str] = []

    def __call__(self, handler: Handler) -> bool:
        place = {"Location": "/v2/r/blobs/uploads/1?state=x"}
        if handler.command == "PATCH":
            length = int(handler.headers["Content-Length"])
            self.pieces.append(handler.headers["Content-Range"])
            self.data += handler.rfile.read(min(length, self.most))
            if length > self.most:
                handler.close_connection = True
                return True
            handler.answer(202, extra=place)
        elif handler.command == "PUT":
            handler.answer(201)
        elif handler.command == "GET":
            handler.answer(204, extra={**place, "Range": f"0-{max(0, len(self.data) - 1)}"})
        else:
            handler.answer(202, extra=place)
        return True


def test_an_upload_goes_on_where_it_broke_off() -> None:
    """Checks that an interrupted upload continues after the bytes that the server has received."""
    data = os.urandom(2500)
    uploads = Uploads(1000)
    with serving(uploads) as server, Registry(parse(f"oci://{server.url[7:]}/r")) as repository:
        actual = repository.send(io.BytesIO(data), len(data))
    assert actual == digest_of(data) and uploads.data == data
    assert uploads.pieces[0] == "0-2499" and uploads.pieces[-1] == "2000-2499"


@pytest.mark.parametrize(
    ("address", "location"),
    [
        ("oci://registry.example:443/r", "https://registry.example/v2/r/1?state=x"),
        ("oci://registry.example/r", "https://registry.example:443/v2/r/1?state=x"),
        ("oci://Registry.Example/r", "https://registry.example/v2/r/1?state=x"),
        ("oci://127.0.0.1:80/r", "http://127.0.0.1/v2/r/1?state=x"),
    ],
)
def test_an_upload_goes_on_at_another_spelling_of_the_registry(address: str, location: str) -> None:
    answer = cast(BaseHTTPResponse, SimpleNamespace(headers={"Location": location}))
    with Registry(parse(address)) as repository:
        assert repository._location(answer) == "/v2/r/1?state=x"
        answer.headers["Location"] = location.replace("/v2/", ":8080/v2/").replace(":443:", ":")
        with pytest.raises(RemoteError, match="which is another server"):
            repository._location(answer)


def test_a_part_of_an_upload_is_read_from_its_beginning_only() -> None:
    piece = registry._Piece(io.BytesIO(b"abcdef"), hashlib.sha256(), 0, 2, 5)
    for _ in range(2):
        assert piece.seek(0) == 0 and piece.read() + piece.read() == b"cde"
        assert piece.hasher.hexdigest() == hashlib.sha256(b"abcde").hexdigest()
    with pytest.raises(ValueError, match="from its beginning, not from 1"):
        piece.seek(1)


def test_an_upload_that_never_comes_through_is_given_up() -> None:
    with (
        serving(Uploads(0)) as server,
        Registry(parse(f"oci://{server.url[7:]}/r")) as repository,
        pytest.raises(
            RemoteError, match=r"it does not accept the uploaded bytes|Connection|closed the connection"
        ),
    ):
        repository.send(io.BytesIO(b"x" * 100), 100)


def test_a_blob_may_be_on_another_server_which_gets_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCBUILD_LOGIN_127_0_0_1", LOGIN)
    with serving() as storage:
        storage.content["/blob"] = b"content"

        def elsewhere(handler: Handler) -> bool:
            if "Authorization" not in handler.headers:
                handler.answer(401, extra={"WWW-Authenticate": 'Basic realm="x"'})
            else:
                handler.answer(307, extra={"Location": f"{storage.url}/blob"})
            return True

        with serving(elsewhere) as server, Registry(parse(f"oci://{server.url[7:]}/r")) as repository:
            body = repository.blob(digest_of(b"content"), 3)
            assert body is not None and (body.start, body.read()) == (3, b"tent")
        assert "Authorization" not in storage.headers[0]


@needs_registry
def test_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with registries.registry(tmp_path / "registry", registries.PASSWORDS) as server:
        refused = User(tmp_path / "0", server.url("cache"))
        assert statuses(refused.run()) == BUILT
        assert "it requires credentials (status 401): set $MLCBUILD_TOKEN_127_0_0_1" in refused.warnings()[0]
        monkeypatch.setenv("MLCBUILD_LOGIN_127_0_0_1", "ann:wrong-s3")
        wrong = User(tmp_path / "1", server.url("cache"))
        assert wrong.run().ok
        assert "it refuses the credentials for 127.0.0.1" in wrong.warnings()[0]
        assert "wrong-s3" not in wrong.warnings()[0]
        monkeypatch.delenv("MLCBUILD_LOGIN_127_0_0_1")
        (tmp_path / ".docker").mkdir()
        stored = auth.basic(LOGIN).removeprefix("Basic ")
        document = {"auths": {f"127.0.0.1:{server.port}": {"auth": stored}, "other": {"auth": "x"}}}
        (tmp_path / ".docker" / "config.json").write_text(json.dumps(document))
        user = User(tmp_path / "2", server.url("cache"))
        assert user.run().not_uploaded == {} and user.warnings() == []
        helper = tmp_path / "bin" / "docker-credential-tests"
        helper.parent.mkdir()
        helper.write_text(
            f"#!{sys.executable}\nimport sys\nassert sys.argv[1:] == ['get']\n"
            f"assert sys.stdin.read() == '127.0.0.1:{server.port}'\n"
            'print(\'{"ServerURL": "x", "Username": "ann", "Secret": "s3cret"}\')\n'
        )
        helper.chmod(0o755)
        monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
        (tmp_path / ".docker" / "config.json").write_text(json.dumps({"credsStore": "tests"}))
        assert set(statuses(User(tmp_path / "3", server.url("cache")).run()).values()) == {"reused"}
        (tmp_path / ".docker" / "config.json").write_text("s3cret")
        broken = User(tmp_path / "4", server.url("cache"))
        assert broken.run().ok
        (warning,) = broken.warnings()
        assert ".docker/config.json: the file cannot be parsed" in warning and "s3cret" not in warning


@needs_registry
def test_tokens_are_fetched_from_the_service_that_the_registry_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registries.tokens(tmp_path) as service, registries.registry(tmp_path / "r", service.auth) as server:
        monkeypatch.setenv("MLCBUILD_LOGIN_127_0_0_1", LOGIN)
        assert User(tmp_path / "1", server.url("team/cache")).run().not_uploaded == {}
        assert set(statuses(User(tmp_path / "2", server.url("team/cache")).run()).values()) == {"reused"}
        scopes = [scope for query in service.asked for scope in query["scope"]]
        assert set(scopes) == {"repository:team/cache:pull", "repository:team/cache:pull,push"}
        assert len(scopes) <= 6, "a token is used until it is refused"
        monkeypatch.setenv("MLCBUILD_LOGIN_127_0_0_1", "ann:other")
        wrong = User(tmp_path / "3", server.url("team/cache"))
        assert wrong.run().ok
        assert "it refuses the credentials for 127.0.0.1" in wrong.warnings()[0]


def test_a_token_is_fetched_although_the_registry_also_offers_passwords() -> None:
    """Checks a registry that offers "Basic" and "Bearer", and whose token service has a query in its URL."""
    asked = list[str]()

    def registry_and_tokens(handler: Handler) -> bool:
        asked.append(handler.path)
        if handler.path.startswith("/token"):
            handler.answer(200, b'{"token": "t"}')
        elif handler.headers.get("Authorization") == "Bearer t":
            handler.answer(404)
        else:
            realm = f"http://{handler.headers['Host']}/token?account=x"
            offers = f'Basic realm="{realm}", Bearer realm="{realm}",service="s", Basic realm="y"'
            handler.answer(401, extra={"WWW-Authenticate": offers})
        return True

    with serving(registry_and_tokens) as server, Registry(parse(f"oci://{server.url[7:]}/r")) as repository:
        assert repository.manifest("v1") is None
    assert asked[1] == "/token?account=x&service=s&scope=repository%3Ar%3Apull"


def test_a_refresh_token_is_exchanged_for_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the login that `docker login` stores as `identitytoken`, in its file or in a helper."""
    forms = list[dict[str, list[str]]]()

    def registry_and_tokens(handler: Handler) -> bool:
        if handler.path == "/oauth2/token?account=x":
            forms.append(parse_qs(handler.body().decode()))
            handler.answer(200, b'{"access_token": "t"}')
        elif handler.headers.get("Authorization") == "Bearer t":
            handler.answer(404)
        else:
            realm = f"http://{handler.headers['Host']}/oauth2/token?account=x"
            handler.answer(401, extra={"WWW-Authenticate": f'Bearer realm="{realm}",service="s"'})
        return True

    helper = tmp_path / "docker-credential-tests"
    helper.write_text('#!/bin/sh\necho \'{"Username": "<token>", "Secret": "a&b"}\'\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with serving(registry_and_tokens) as server:
        host = server.url[7:]
        for content in ({"auths": {host: {"identitytoken": "a&b"}}}, {"credHelpers": {host: "tests"}}):
            (tmp_path / "config.json").write_text(json.dumps(content))
            with Registry(parse(f"oci://{host}/r")) as repository:
                assert repository.manifest("v1") is None
    expected = {"grant_type": "refresh_token", "refresh_token": "a&b", "client_id": "mlcbuild"}
    form = {name: [value] for name, value in expected.items()}
    assert forms == [{**form, "service": ["s"], "scope": ["repository:r:pull"]}] * 2


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("oci://host", "names no repository: oci://host/name"),
        ("oci://host/Team", "names no repository: oci://host/name"),
        ("oci:///x", "names no repository: oci://host/name"),
        ("oci://host/x?insecure=1", "after '?' there can be plain-http=true or plain-http=false"),
        ("oci://host/x:tag", "has a tag or digest: a cache is a whole repository"),
        ("oci://host/x:-tag", "'-tag' is neither a tag (letters, digits, '.', '_', '-') nor sha256: and"),
        ("oci://u:secret@host/x", "a URL must not hold a user name or password"),
        ("oci://host:5000/team/x_y?plain-http=true", ""),
    ],
)
def test_addresses_are_checked(url: str, words: str) -> None:
    actual = fault(url)
    assert words in actual if words else actual == ""


def test_http_is_spoken_where_that_is_safe_or_wanted() -> None:
    addresses = {
        "oci://host/x": "https://host",
        "oci://127.0.0.1:5000/x": "http://127.0.0.1:5000",
        "oci://localhost/x": "http://localhost",
        "oci://127.0.0.1/x?plain-http=false": "https://127.0.0.1",
        "oci://host/x?plain-http=true": "http://host",
    }
    assert {url: parse(url).address for url in addresses} == addresses


LIARS = {
    "other bytes": (200, b'{"layers": []}', "other bytes than its digest states"),
    "too much": (200, b"x" * (5 << 20), "has more than 4194304 bytes"),
    "missing": (404, b"", ""),
    "broken": (500, b"", "it answered with status 500"),
}


@pytest.mark.parametrize("name", LIARS)
def test_a_manifest_is_what_its_digest_says(name: str) -> None:
    status, data, words = LIARS[name]

    def lies(handler: Handler) -> bool:
        handler.answer(status, data)
        return True

    with serving(lies) as server, Registry(parse(f"oci://{server.url[7:]}/r")) as repository:
        if not words:
            assert repository.manifest(digest_of(b"x")) is None
            return
        with pytest.raises(RemoteError, match=words):
            repository.manifest(digest_of(b"x"))


@pytest.mark.parametrize("data", [b"[]", b"{", b'{"layers": []}', b'{"layers": [{"digest": "x"}]}'])
def test_a_tag_of_something_else_is_refused(data: bytes, tmp_path: Path) -> None:
    def other(handler: Handler) -> bool:
        handler.answer(200, data)
        return True

    with serving(other) as server:
        user = User(tmp_path / "one", f"oci://{server.url[7:]}/r")
        assert statuses(user.run()) == BUILT
        refused = [warning for warning in user.warnings() if " is refused: " in warning]
        assert all("the tag does not name a file of a cache" in text for text in refused)
        assert len(refused) == 3 and "is not read again in this run" in " ".join(user.warnings())


def test_a_blob_that_the_registry_lost_is_sent_anew(registry_server: Server, tmp_path: Path) -> None:
    """Checks that a blob which was deleted from a registry, while its tag remained, is uploaded again by the
    next user who builds the step."""
    repository = f"team/{secrets.token_hex(8)}"
    first = User(tmp_path / "1", registry_server.url(repository))
    (record,) = [step.record for step in first.run().steps if step.name == "c"]
    assert record is not None
    manifest = json.loads(registry_server.get(f"{repository}/manifests/cas-{record.files[0].digest}"))
    digest = manifest["layers"][0]["digest"]
    asked = urllib.request.Request(
        f"http://127.0.0.1:{registry_server.port}/v2/{repository}/blobs/{digest}", method="DELETE"
    )
    urllib.request.urlopen(asked).close()
    second = User(tmp_path / "2", registry_server.url(repository))
    assert statuses(second.run())["c"] == "built"
    (warning,) = second.warnings()
    assert "is refused: the registry lacks the blob that the tag names" in warning
    third = User(tmp_path / "3", registry_server.url(repository))
    assert statuses(third.run())["c"] == "reused" and third.warnings() == []
