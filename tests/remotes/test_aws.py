"""Tests of addresses of S3 buckets, and of finding credentials where other tools keep them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import aws, fault

LOGIN = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "'s3://' names no bucket: s3://bucket/prefix"),
        ("s3://Bad_Name/x", "names no bucket"),
        ("s3://b1x/x?endpont=https://y", "the option 'endpont' is unknown: there are endpoint and region"),
        ("s3://b1x?endpoint=ftp://y", "the endpoint must be https://host or http://host"),
        ("s3://b1x?endpoint=https://u:secret@y", "the endpoint must be https://host or http://host"),
        ("s3://u:secret@b1x", "a URL must not hold a user name or password"),
        ("s3://b1x/#f", "must be an address alone"),
        ("s3://b1x/p?endpoint=https://y:9000&region=eu", ""),
    ],
)
def test_addresses_are_checked(url: str, words: str) -> None:
    actual = fault(url)
    assert (words in actual if words else actual == "") and "secret@" not in actual.replace(url, "")


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
    actual = aws.settings("s3://bucket", environ)
    assert actual == {"access_key_id": "me", "secret_access_key": "secret", **expected}
    assert aws.settings("s3://bucket?region=mine", environ)["region"] == "mine"
    assert aws.settings("s3://b", {"AWS_SKIP_SIGNATURE": "true", **environ}).get("access_key_id") is None


def test_a_stated_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws" / "config").mkdir(parents=True)
    with pytest.raises(RemoteError, match="there are no credentials"):
        aws.settings("s3://bucket", {})
    with pytest.raises(RemoteError, match=r"config: the file cannot be read: Is a directory"):
        aws.settings("s3://bucket", {"AWS_CONFIG_FILE": str(tmp_path / ".aws" / "config")})
    assert aws.settings("s3://bucket", LOGIN | {"AWS_CONFIG_FILE": str(tmp_path / "none")})
