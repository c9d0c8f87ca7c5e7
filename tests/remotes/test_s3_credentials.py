"""Tests of credentials for S3, and of the messages if they are missing or wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import client
from mlcbuild.remotes.kinds import connect
from tests.caches import Handler, serving
from tests.remotes.s3_content import NAME
from tests.remotes.users import BUILT, User, statuses


@pytest.mark.parametrize(
    ("status", "headers", "answer", "words"),
    [
        (
            400,
            {"x-amz-bucket-region": "eu-1"},
            b"",
            "the bucket is in the region eu-1: write region=eu-1 into",
        ),
        (
            301,
            {"x-amz-bucket-region": "us-east-1"},
            b"",
            "it redirects clients (status 301): write the",
        ),
        (301, {"x-amz-bucket-region": "e\\u"}, b"", "it redirects clients (status 301): write the"),
        (403, {"Date": "Mon, 01 Jan 2024 00:00:00 GMT"}, b"", "its clock and that of this machine differ by"),
        (
            403,
            {"Date": "Mon, 99 Jan 99999999999 00:00:00 GMT"},
            b"",
            "it refuses the credentials (status 403)",
        ),
        (404, {}, b"<Error><Code>NoSuchBucket</Code>", "there is no bucket bucket: create it"),
        (503, {}, b"<Error><Code>SlowDown</Code>", "it answered with status 503, SlowDown"),
        (418, {}, b"<Code>" + b"x" * 300_000, "it answered with status 418"),
    ],
)
def test_refusals_are_explained(
    status: int,
    headers: dict[str, str],
    answer: bytes,
    words: str,
    s3_login: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.0,))

    def refuses(handler: Handler) -> bool:
        handler.answer(status, answer, headers)
        return True

    with serving(refuses) as cache, pytest.raises(RemoteError) as caught:
        connect(cache.bucket).open(NAME)
    assert str(caught.value).startswith(words) and len(str(caught.value)) < 200


def test_where_credentials_come_from_is_asked_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3_login: None
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    inputs: list[bool] = []

    def guard(handler: Handler) -> bool:
        if "/login" not in handler.path:
            return False
        if inputs:
            document = {
                "AccessKeyId": "me",
                "SecretAccessKey": "hunter2",
                "Token": "t",
                "Expiration": "2999-01-01T00:00:00Z",
            }
            handler.answer(200, json.dumps(document).encode())
        else:
            handler.answer(403, b"hunter2")
        return True

    with serving(guard) as cache:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{cache.url}/login?secret=hunter2")
        token = tmp_path / "token"
        token.write_text("hunter2")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
        with pytest.raises(RemoteError) as caught:
            connect(cache.bucket).size(NAME)
        assert "hunter2" not in str(caught.value)
        inputs.append(True)
        assert connect(cache.bucket).size(NAME) is None


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
    assert warning.endswith(".aws/credentials: the file cannot be parsed") and "hunter2" not in warning


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
