"""Tests that a real nginx accepts ci/nginx-cache.conf, and that a store can be filled through it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.caches import nginx
from tests.conftest import ROOT
from tests.remotes.users import BUILT, REUSED, User, needs_nginx, statuses


@needs_nginx
def test_readers_need_no_password_and_writers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = tmp_path / "cache"
    (cache / "mlc").mkdir(parents=True)
    (tmp_path / "users").write_text("ann:{PLAIN}s3cret\n")
    snippet = (ROOT / "ci" / "nginx-cache.conf").read_text()
    for written, actual in (("/srv/cache", cache), ("/etc/nginx/cache.htpasswd", tmp_path / "users")):
        assert written in snippet
        snippet = snippet.replace(written, str(actual))
    with nginx(tmp_path / "nginx", locations=snippet) as server:
        url = f"{server.url}/mlc"
        stranger = User(tmp_path / "stranger", url)
        assert (
            stranger.run().not_uploaded and "it requires credentials (status 401)" in stranger.warnings()[0]
        )
        monkeypatch.setenv("MLCBUILD_LOGIN_127_0_0_1", "ann:s3cret")
        writer = User(tmp_path / "writer", url)
        result = writer.run()
        assert (statuses(result), result.not_uploaded, writer.warnings()) == (BUILT, {}, [])
        monkeypatch.delenv("MLCBUILD_LOGIN_127_0_0_1")
        assert statuses(User(tmp_path / "reader", url, mode="read").run()) == REUSED
        (record, *_) = (cache / "mlc" / "ac").iterdir()
        assert httpx.delete(f"{url}/ac/{record.name}").status_code == 401 and record.exists()
