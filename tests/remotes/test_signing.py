"""Tests of presigned URLs: reads use them, and they are signed again before they expire."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

import pytest

from mlcbuild.remotes import ranges, s3
from mlcbuild.remotes.kinds import connect
from tests.caches import Handler, serving
from tests.remotes.s3_content import NAME, SIZE, content


def queries(handlers: list[str]) -> list[dict[str, str]]:
    return [dict(parse_qsl(urlsplit(line.split()[1]).query)) for line in handlers]


def test_what_is_read_is_signed_in_its_address(s3_login: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token/+=")
    lines: list[str] = []

    def noting(handler: Handler) -> bool:
        lines.append(handler.requestline)
        return False

    with serving(noting) as cache:
        cache.content[f"/{NAME}"] = b"data"
        assert content(connect(cache.bucket), NAME) == b"data"
        assert connect(f"s3://bucket/a%20b?region=eu-9&endpoint={cache.url}/some/where").size(NAME) is None
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        assert content(connect(cache.bucket), NAME) == b"data"
        assert connect(cache.bucket).size(NAME) == 4
    first, second, *public = queries(lines)
    assert first["X-Amz-Security-Token"] == "token/+=" and first["X-Amz-Expires"] == "1200"
    assert first["X-Amz-SignedHeaders"] == "host" and len(first["X-Amz-Signature"]) == 64
    assert lines[1].startswith(f"HEAD /some/where/bucket/a%20b/{NAME}?X-Amz-")
    assert second["X-Amz-Credential"].endswith("/eu-9/s3/aws4_request")
    assert public == [{}, {}]


def test_a_long_download_is_signed_again_before_the_signature_expires(
    s3_login: None, short_ranges: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = []
    sign = s3.S3.sign

    def noted(self: s3.S3, method: Literal["GET", "HEAD"], name: str) -> str:
        signed.append(name)
        return sign(self, method, name)

    monkeypatch.setattr(s3.S3, "sign", noted)
    monkeypatch.setattr(ranges, "FAST", 0)
    with serving() as cache:
        cache.content[f"/{NAME}"] = bytes(SIZE)
        transport = connect(cache.bucket)
        assert len(content(transport, NAME)) == SIZE and len(signed) == 1
        monkeypatch.setattr(s3, "EXPIRY", timedelta(seconds=s3._SKEW))
        assert len(content(transport, NAME)) == SIZE and len(signed) == 1 + 3
        transport.close()
