"""S3: what only this protocol has. The common ground of all remotes is in test_remotes."""

from __future__ import annotations

import io
import os
import secrets
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import pytest

from mlcbuild.canon import bytes_digest
from mlcbuild.errors import RemoteError
from mlcbuild.graph import Graph
from mlcbuild.remotes import aws, fault
from mlcbuild.remotes.link import connect
from mlcbuild.remotes.transport import Transport
from mlcbuild.upkeep import verify
from tests.buckets import Server
from tests.caches import Handler, serving
from tests.conftest import checked, mlcbuild
from tests.test_remotes import BUILT, CHAIN, User, statuses, step

NAME = "cas/" + "5" * 64
LOGIN = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture
def bucket(s3_login: None, s3_server: Server) -> str:
    return s3_server.bucket(f"b{secrets.token_hex(8)}")


def content(transport: Transport, name: str, start: int = 0) -> bytes:
    body = transport.open(name, start)
    assert body is not None and body.start == start
    with body:
        return b"".join(iter(body.read, b""))


def test_large_objects_go_in_parts_and_come_in_ranges(bucket: str, s3_server: Server, tmp_path: Path) -> None:
    graph = Graph([step("big", "big", bytes=30_000_001)])
    User(tmp_path / "one", bucket).run(graph)
    second = User(tmp_path / "two", bucket)
    with second.store.session():
        pass
    digest = bytes_digest(b"x" * 30_000_001)
    (second.store.root / "partial").mkdir()
    (second.store.root / "partial" / digest).write_bytes(b"x" * 9_999_999)
    assert statuses(second.run(graph)) == {"big": "reused"} and second.warnings() == []
    assert verify(second.store).ok
    log = (s3_server.home / "radosgw.log").read_text()
    requests = [line for line in log.splitlines() if digest in line and "beast" in line]
    assert sum("PUT" in line and "partNumber" in line for line in requests) == 4
    starts = sorted(int(line.split("bytes=")[1].partition("-")[0]) for line in requests if "bytes=" in line)
    assert starts == list(range(9_999_999, 30_000_001, 4 << 20)), "one piece after the other, each once"


def test_what_is_there_first_stays(bucket: str) -> None:
    """Two who found nothing send at the same time; who found something wrong replaces it."""
    transport = connect(bucket)
    transport.put(NAME, io.BytesIO(b"first"), 5, new=True)
    transport.put(NAME, io.BytesIO(b"second"), 6, new=True)
    assert (content(transport, NAME), transport.size(NAME)) == (b"first", 5)
    transport.put(NAME, io.BytesIO(b"third"), 5)
    assert content(transport, NAME) == b"third" and content(transport, NAME, 2) == b"ird"
    assert transport.open("cas/" + "6" * 64) is None and transport.size("cas/" + "6" * 64) is None


def test_a_server_that_knows_no_conditions_will_do(s3_login: None, tmp_path: Path) -> None:
    def old(handler: Handler) -> bool:
        conditional = any(name.lower() == "if-none-match" for name in handler.headers)
        if conditional:
            handler.body()
            handler.answer(501, b"<Error><Code>NotImplemented</Code></Error>")
        return conditional

    with serving(old) as cache:
        first = User(tmp_path / "one", cache.bucket)
        assert statuses(first.run()) == BUILT and first.warnings() == []
        assert len(cache.names("ac")) == 3


def test_a_body_begins_at_0_where_less_is_there(bucket: str) -> None:
    transport = connect(bucket)
    for data in (b"short", b""):
        transport.put(NAME, io.BytesIO(data), len(data))
        body = transport.open(NAME, 7)
        assert body is not None and (body.start, body.read(), body.read()) == (0, data, b"")


def test_an_object_that_is_replaced_while_it_is_read_is_no_mixture(bucket: str) -> None:
    transport = connect(bucket)
    size = 40 << 20
    transport.put(NAME, io.BytesIO(b"a" * size), size)
    body = transport.open(NAME)
    assert body is not None
    with body:
        assert body.read()[:1] == b"a"
        transport.put(NAME, io.BytesIO(b"b" * size), size)
        with pytest.raises(RemoteError, match=r"the object was replaced while it was read|status 412"):
            while data := body.read():
                assert set(data) == {ord("a")}


class Ends(io.BytesIO):
    def read(self, count: int | None = -1) -> bytes:
        if self.tell() > 20 << 20:
            raise RemoteError("the source ends")
        return super().read(count)


def test_an_upload_that_ends_early_leaves_nothing(bucket: str, s3_server: Server) -> None:
    transport = connect(bucket)
    sources: tuple[tuple[BinaryIO, int, type[Exception]], ...] = (
        (Ends(b"x" * (30 << 20)), 30 << 20, RemoteError),
        (io.BytesIO(b"x" * (20 << 20)), 30 << 20, OSError),
        (io.BytesIO(b"x"), 2, OSError),
    )
    for source, size, kind in sources:
        with pytest.raises(kind, match=r"the source ends|bytes to send are missing"):
            transport.put(NAME, source, size)
    assert s3_server.objects(bucket[5:].partition("/")[0]) == []


def test_a_closed_transport_wakes_who_waits(s3_login: None) -> None:
    asked, answered = threading.Event(), threading.Event()

    def silent(handler: Handler) -> bool:
        asked.set()
        answered.wait()
        return True

    with serving(silent) as cache:
        transport = connect(cache.bucket)

        def close() -> None:
            asked.wait()
            transport.close()

        threading.Thread(target=close).start()
        with pytest.raises(RemoteError, match="the run ends"):
            transport.open(NAME)
        with pytest.raises(RemoteError, match="the run ends"):
            transport.size(NAME)
        answered.set()


# Addresses and credentials


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "'s3://' names no bucket: s3://bucket/prefix"),
        ("s3://Bad_Name/x", "names no bucket"),
        ("s3://b1x/x?endpont=https://y", "the option 'endpont' is unknown: there are endpoint and region"),
        ("s3://b1x?endpoint=ftp://y", "the endpoint must be https://host or http://host"),
        ("s3://b1x?endpoint=https://u:secret@y", "the endpoint must be https://host or http://host"),
        ("s3://u:secret@b1x", "a URL with a user name or password is not taken"),
        ("s3://b1x/#f", "must be an address alone"),
        ("s3://b1x/p?endpoint=https://y:9000&region=eu", ""),
    ],
)
def test_addresses_are_checked(url: str, words: str) -> None:
    found = fault(url)
    assert (words in found if words else found == "") and "secret@" not in found.replace(url, "")


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        (LOGIN, {}, {"region": "us-east-1"}),
        (
            LOGIN | {"AWS_DEFAULT_REGION": "a", "AWS_REGION": "b", "AWS_ENDPOINT_URL": "http://h"},
            {"config": "[default]\nregion = c\n"},
            {"region": "b", "endpoint": "http://h"},
        ),
        (
            {},
            {"credentials": "[default]\naws_access_key_id=me\naws_secret_access_key = secret\n"},
            {"region": "us-east-1"},
        ),
        (
            {"AWS_PROFILE": "work"},
            {
                "credentials": "[default]\naws_access_key_id=no\n[work]\naws_access_key_id=me\n"
                "aws_secret_access_key=secret\naws_session_token=t\n",
                "config": "[profile work]\nregion = r\nendpoint_url = https://h\n[default]\nregion=no\n",
            },
            {"region": "r", "endpoint": "https://h", "session_token": "t"},
        ),
        (
            LOGIN,
            {"credentials": "[default]\naws_access_key_id=no\naws_session_token=not mine\n"},
            {"region": "us-east-1"},
        ),
    ],
)
def test_credentials_are_where_other_tools_have_them(
    environ: Mapping[str, str],
    files: Mapping[str, str],
    expected: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    for name, text in files.items():
        (tmp_path / ".aws" / name).write_text(text)
    found = aws.settings("s3://bucket", environ)
    assert found == {"access_key_id": "me", "secret_access_key": "secret", **expected}
    assert aws.settings("s3://bucket?region=mine", environ)["region"] == "mine"
    assert aws.settings("s3://b", {"AWS_SKIP_SIGNATURE": "true", **environ}).get("access_key_id") is None


def test_credentials_that_are_missing_or_wrong_cost_one_warning(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    wrong = User(tmp_path / "1", bucket)
    assert wrong.run().ok
    (warning,) = wrong.warnings()
    assert "it refuses the credentials (status 403" in warning and "hunter2" not in warning
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    without = User(tmp_path / "2", bucket)
    assert without.run().ok
    (warning,) = without.warnings()
    assert "there are no credentials for it: set $AWS_ACCESS_KEY_ID and" in warning
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("hunter2\n")
    broken = User(tmp_path / "3", bucket)
    assert broken.run().ok
    (warning,) = broken.warnings()
    assert warning.endswith(".aws/credentials: the file cannot be understood") and "hunter2" not in warning


def test_a_bucket_that_is_not_there_costs_one_warning(bucket: str, tmp_path: Path) -> None:
    user = User(tmp_path / "1", bucket.replace("s3://b", "s3://no"))
    result = user.run()
    assert statuses(result) == BUILT and len(result.not_uploaded) == 3
    (warning,) = user.warnings()
    assert "there is no bucket nob" in warning or "there is no bucket no" in warning


def test_without_the_package_a_sentence_says_how_to_get_it(
    tmp_path: Path, s3_login: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    user = User(tmp_path / "1", "s3://bucket/x")
    assert statuses(user.run()) == BUILT
    assert user.warnings() == [
        "s3://bucket/x is not used in this run: it needs the package obstore: pip install 'mlcbuild[s3]'"
    ]


def test_a_store_is_pushed_to_a_bucket(bucket: str, tmp_path: Path) -> None:
    user = User(tmp_path / "one")
    user.run(CHAIN)
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    said = checked(mlcbuild("cache", "push", "--all", bucket, store=user.store.root, variables=variables))
    assert said == f"{bucket}: 3 of 3 records are there\n"
    assert set(statuses(User(tmp_path / "two", bucket).run()).values()) == {"reused"}
