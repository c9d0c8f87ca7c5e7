"""Tests of remotes that fail or send meaningless answers, and of credentials for remotes."""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import client
from mlcbuild.remotes.kinds import connect
from mlcbuild.store.upkeep import verify
from tests.caches import Cache, Handler, nginx, serving
from tests.remotes.users import BUILT, REUSED, User, needs_nginx, statuses


def down(handler: Handler) -> bool:
    handler.answer(500, b"no")
    return True


def unauthorised(handler: Handler) -> bool:
    handler.body()
    handler.answer(401)
    return True


def full(handler: Handler) -> bool:
    if handler.command == "PUT":
        handler.body()
        handler.answer(507)
    return handler.command == "PUT"


def elsewhere(handler: Handler) -> bool:
    handler.answer(302, extra={"Location": "http://127.0.0.1:1/"})
    return True


def silent(handler: Handler) -> bool:
    time.sleep(3)
    return True


def gibberish(handler: Handler) -> bool:
    handler.wfile.write(b"what do you want?\r\n\r\n")
    handler.close_connection = True
    return True


FAILING = {
    "down": (down, "it answered with status 500"),
    "unauthorised": (
        unauthorised,
        r"it (requires credentials \(status 401\): set \$MLCBUILD_TOKEN_127_0_0_1 to a token"
        r"|refuses the credentials)",
    ),
    "full": (full, r"it is full \(status 507\)"),
    "elsewhere": (
        elsewhere,
        r"it redirects clients \(status 302\): write the final address|Connection refused",
    ),
    "silent": (silent, "it does not answer"),
    "gibberish": (gibberish, "its answer is not HTTP"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_cache_that_fails_costs_one_warning(
    name: str, address: Callable[[Cache], str], tmp_path: Path
) -> None:
    fault, words = FAILING[name]
    with serving(fault) as cache:
        user = User(tmp_path / "one", address(cache))
        user.timeout = 0.5 if fault is silent else user.timeout
        result = user.run()
        assert statuses(result) == BUILT and result.exit_code == 0
        (warning,) = user.warnings()
        assert re.search(words, warning) and warning.startswith(address(cache))
        assert result.not_uploaded == dict.fromkeys(BUILT, (address(cache),))
    assert verify(user.store).ok


def test_no_server_and_no_directory_cost_one_warning_each(tmp_path: Path) -> None:
    with serving() as gone:
        pass
    user = User(tmp_path / "one", gone.url, (tmp_path / "nowhere").as_uri())
    assert statuses(user.run()) == BUILT
    first, second = sorted(user.warnings())
    assert second.endswith("is not used in this run: Connection refused")
    assert first.endswith(f"there is no directory {tmp_path}/nowhere: create it, or mount it")
    assert not (tmp_path / "nowhere").exists()


def test_connections_are_used_again(
    address: Callable[[Cache], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = threading.Event()

    def fault(handler: Handler) -> bool:
        handler.close_connection = leaves.is_set()  # and does not say so
        return False

    monkeypatch.setattr(client, "PAUSES", (0.0,))
    with serving(fault) as cache:
        User(tmp_path / "one", address(cache)).run()
        for expected in (1, 14):
            cache.clients.clear()
            transport = connect(address(cache))
            for name in [*cache.names("ac"), *cache.names("cas"), "/cas/none"]:
                body = transport.open(name[1:])
                if body is not None:
                    with body:
                        assert b"".join(map(bytes, iter(body.read, b""))) == cache.content[name]
                time.sleep(0.01)
                assert (transport.size(name[1:]) is None) == (body is None)
                time.sleep(0.01)
            assert len(cache.clients) == expected
            leaves.set()
            transport.close()
            with pytest.raises(RemoteError, match="the run ends"):
                transport.size("cas/none")


def test_answers_that_say_nothing_may_be_broken_or_endless(
    address: Callable[[Cache], str], tmp_path: Path
) -> None:
    def fault(handler: Handler) -> bool:
        if handler.command == "PUT":
            handler.cache.content[handler.path] = handler.body()
            handler.answer(200, b"x", length=99)
        elif handler.command == "GET" and handler.path not in handler.cache.content:
            handler.send_response(404)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            handler.close_connection = True
            for _ in range(300):
                handler.wfile.write(b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20)))
        else:
            return False
        return True

    with serving(fault) as cache:
        first = User(tmp_path / "one", address(cache))
        assert statuses(first.run()) == BUILT and first.warnings() == []
        assert statuses(User(tmp_path / "two", address(cache)).run()) == REUSED


@needs_nginx
def test_credentials_come_from_the_environment_or_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with nginx(tmp_path / "nginx", "ann:{PLAIN}s3cret\n") as server:
        refused = User(tmp_path / "0", server.url)
        assert refused.run().not_uploaded and "it requires credentials (status 401)" in refused.warnings()[0]
        monkeypatch.setenv("MLCBUILD_LOGIN_127_0_0_1", "ann:wrong")
        wrong = User(tmp_path / "1", server.url)
        assert wrong.run().ok
        assert wrong.warnings()[0].endswith("it refuses the credentials for 127.0.0.1 (status 401)")
        monkeypatch.setenv("MLCBUILD_LOGIN_127_0_0_1", "ann:s3cret")
        assert User(tmp_path / "2", server.url).run().not_uploaded == {}
        monkeypatch.delenv("MLCBUILD_LOGIN_127_0_0_1")
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login ann password s3cret\n")
        (tmp_path / ".netrc").chmod(0o600)
        user = User(tmp_path / "3", server.url)
        result = user.run()
        assert statuses(result) == REUSED
        kept = b"".join(p.read_bytes() for p in user.store.root.rglob("*") if p.is_file())
        assert b"s3cret" not in kept and "s3cret" not in repr((result, user.events))


def test_a_token_is_sent_to_its_host_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLCBUILD_TOKEN_127_0_0_1", "tok")
    monkeypatch.setenv("MLCBUILD_TOKEN_OTHER", "other")
    with serving() as cache:
        User(tmp_path / "one", cache.url).run()
        assert {h.get("Authorization") for h in cache.headers} == {"Bearer tok"}
        monkeypatch.setenv("MLCBUILD_TOKEN_127_0_0_1", "")
        monkeypatch.setenv("MLCBUILD_LOGIN_127_0_0_1", "me:pass")
        cache.headers.clear()
        User(tmp_path / "two", cache.url).run()
        expected = "Basic " + base64.b64encode(b"me:pass").decode()
        assert {h.get("Authorization") for h in cache.headers} == {expected}


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("MLCBUILD_TOKEN_127_0_0_1", "a\r\nHost: b", "the token in $MLCBUILD_TOKEN_127_0_0_1 holds a space"),
        ("MLCBUILD_LOGIN_127_0_0_1", "secret", "$MLCBUILD_LOGIN_127_0_0_1 must be user:password"),
        ("MLCBUILD_LOGIN_127_0_0_1", "me:secret\udcff", "must be user:password, in UTF-8"),
        ("MLCBUILD_LOGIN_127_0_0_1", "me:secret\n", "must be user:password, in UTF-8"),
        ("NETRC", "machine x login a password secret bogus", "netrc:1: the file cannot be parsed"),
    ],
)
def test_credentials_that_cannot_be_used_are_told_without_them(
    variable: str, value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable == "NETRC":
        (tmp_path / "netrc").write_text(value)
        value = str(tmp_path / "netrc")
    monkeypatch.setenv(variable, value)
    user = User(tmp_path / "one", "http://127.0.0.1:1")
    assert user.run().ok
    (warning,) = user.warnings()
    assert words in warning and "secret" not in warning and "Host" not in warning
