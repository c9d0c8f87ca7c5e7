"""Tests of a cache on a web server: one request for each operation, and what its answers mean."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.http import Http
from tests.caches import Handler, serving

NAME = "cas/" + "0" * 64


@pytest.fixture(autouse=True)
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_objects_are_put_and_read_from_any_byte() -> None:
    with serving() as cache:
        http = Http(f"{cache.url}/a%20b/")
        http.put(NAME, io.BytesIO(b"0123456789"), 10)
        assert cache.content == {f"/a%20b/{NAME}": b"0123456789"} and http.size(NAME) == 10
        for start, expected in ((0, b"0123456789"), (7, b"789")):
            body = http.open(NAME, start)
            assert body is not None and body.start == start
            with body:
                assert bytes(body.read()) == expected and not body.read()
        assert http.size("cas/none") is None and http.open("cas/none") is None
        assert [method for method, _ in cache.requests] == ["PUT", "HEAD", "GET", "GET", "HEAD", "GET"]
        http.close()


def test_an_object_that_became_shorter_is_read_from_its_beginning() -> None:
    with serving() as cache:
        cache.content[f"/{NAME}"] = b"012"
        http = Http(cache.url)
        body = http.open(NAME, 7)
        assert body is not None and body.start == 0
        with body:
            assert bytes(body.read()) == b"012"
        http.close()


def test_a_missing_collection_is_created() -> None:
    created_paths: list[str] = []

    def fault(handler: Handler) -> bool:
        if handler.command == "MKCOL":
            created_paths.append(handler.path)
            handler.answer(201)
            return True
        if handler.command == "PUT" and not created_paths:
            handler.body()
            handler.answer(409)
            return True
        return False

    with serving(fault) as cache:
        http = Http(cache.url)
        http.put(NAME, io.BytesIO(b"x"), 1)
        assert created_paths == ["/cas/"] and cache.content == {f"/{NAME}": b"x"}
        http.close()


def answers(status: int) -> Callable[[Handler], bool]:
    def fault(handler: Handler) -> bool:
        if handler.command == "PUT":
            handler.body()
        handler.answer(status, b"no")
        return True

    return fault


@pytest.mark.parametrize(
    ("status", "words"), [(401, "401"), (403, "403"), (400, "400"), (302, "302"), (204, "204")]
)
def test_other_answers_are_failures(status: int, words: str) -> None:
    with serving(answers(status)) as cache:
        http = Http(cache.url, timeout=5)
        for operation in (lambda: http.open(NAME), lambda: http.size(NAME)):
            with pytest.raises(RemoteError, match=words):
                operation()
        if status != 204:
            with pytest.raises(RemoteError, match=words):
                http.put(NAME, io.BytesIO(b"x"), 1)
        http.close()


def test_credentials_of_the_host_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as cache:
        monkeypatch.setenv("MLCBUILD_TOKEN_127_0_0_1", "t0ken")
        http = Http(cache.url)
        http.size(NAME)
        assert cache.headers[-1]["Authorization"] == "Bearer t0ken"
        http.close()
