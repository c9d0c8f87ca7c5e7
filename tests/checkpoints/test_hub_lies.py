"""Tests of a hub that sends wrong answers: the files of a model arrive intact, or the download fails.
tests/remotes/test_lies.py tests the same for caches."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.caches import serving
from tests.hub import Hub
from tests.hub_client import Client, RefusedError
from tests.remotes.test_lies import LIES, Proxy

FILES = {"config.json": json.dumps({"model_type": "llama"}).encode(), "tokenizer.json": b'{"a": 1}' * 999}
PINS = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in FILES.items()}
EVERY = "MLCBUILD_TEST_EVERY" in os.environ
QUICK = (
    *("flipped", "zeros", "endless", "loop", "other protocol", "login", "challenge", "teapot"),
    *("a range that is none", "packed", "another version"),
)
"""Names of the simulated hub's wrong answers that are tested by default: after these huggingface_hub retries
without a pause. `drops`, which sends one byte at a time and never ends, is not among them, because only a
timeout detects it."""


@pytest.fixture(scope="module")
def lied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, Hub, Client]]:
    with Hub() as hub:
        proxy = Proxy(urlsplit(hub.address).netloc)
        with serving(proxy) as before, Client(tmp_path_factory.mktemp("home"), before.url) as client:
            yield proxy, hub, client


@pytest.mark.parametrize("name", sorted(LIES.keys() - {"drops"}) if EVERY else QUICK)
def test_files_of_a_hub_that_lies_come_right_or_not_at_all(
    name: str, lied: tuple[Proxy, Hub, Client], tmp_path: Path
) -> None:
    proxy, hub, client = lied
    repo = f"org/{name.replace(' ', '-')}"
    commit = hub.add(repo, FILES)
    proxy.lie = LIES[name]
    try:
        client.call("fetch", repo, commit, PINS, str(tmp_path / "out"))
    except RefusedError as error:
        assert error.message.startswith(f"hf://{repo}@{commit}"), str(error)
        assert not re.search(r"Traceback|Error\(|0x[0-9a-f]{6}", error.message)
    else:
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == FILES
    proxy.lie = None
    client.call("fetch", repo, commit, PINS, str(tmp_path / "again"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == FILES
