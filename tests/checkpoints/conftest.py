"""Fixtures for tests with a simulated hub: the server, and a client in its own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub import Hub
from tests.hub_client import Client


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


@pytest.fixture(scope="module")
def client(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(tmp_path_factory.mktemp("home"), hub.address) as process:
        yield process
