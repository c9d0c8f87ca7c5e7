"""Fixtures of the tests of remotes: an empty remote of each kind, and addresses that no host has."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlcbuild.remotes import ranges, s3
from tests.buckets import Server
from tests.caches import Cache, nginx, serving
from tests.remotes.users import needs_nginx

KINDS = ("directory", "server", "nginx", "s3", "oci")
"""Kinds of remotes for which the tests with the fixture `url` run."""


@pytest.fixture(params=[pytest.param(kind, marks=needs_nginx) if kind == "nginx" else kind for kind in KINDS])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yields the URL of an empty remote; the tests that use it run once for each kind of remote."""
    if request.param == "directory":
        (tmp_path / "shared").mkdir()
        yield (tmp_path / "shared").as_uri()
    elif request.param == "s3":
        request.getfixturevalue("s3_login")
        yield request.getfixturevalue("s3_server").bucket(f"b{secrets.token_hex(8)}")
    elif request.param == "oci":
        yield request.getfixturevalue("registry_server").url(f"team/b{secrets.token_hex(8)}")
    elif request.param == "server":
        with serving() as cache:
            yield cache.url
    else:
        with nginx(tmp_path / "nginx") as server:
            yield server.url


@pytest.fixture(params=["http", "s3"])
def address(request: pytest.FixtureRequest) -> Callable[[Cache], str]:
    """Returns a function: simulated cache -> its URL, for each protocol that the cache implements. The cache
    can fail and send wrong answers."""
    if request.param == "http":
        return lambda cache: cache.url
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'mlcbuild[s3]'")
    request.getfixturevalue("s3_login")
    return lambda cache: cache.bucket


@pytest.fixture
def bucket(s3_login: None, s3_server: Server) -> str:
    return s3_server.bucket(f"b{secrets.token_hex(8)}")


@pytest.fixture
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ranges, s3):
        monkeypatch.setattr(module, "FIRST", 1_000_000)
    monkeypatch.setattr(ranges, "PIECE", 1_000_000)
