"""A hub on this machine, and a client for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub import Client, Hub


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


@pytest.fixture(scope="module")
def client(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(tmp_path_factory.mktemp("home"), hub.address) as process:
        yield process
