"""Tests of a worker process: what it offers to a cluster, and how it leaves."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlcbuild.build.cluster import PLENTY, Address, own_label, worker_process
from mlcbuild.build.cluster.site import sites
from mlcbuild.build.cluster.worker_process import Offer
from mlcbuild.errors import SetupError
from mlcbuild.store.store import Store

pytestmark = pytest.mark.xdist_group("cluster")


def test_a_worker_offers_its_labels_its_cores_and_its_own_code() -> None:
    offer = Offer("w", 4, 1000, {"gpu": 2.0})
    assert offer.resources == {"gpu": 2.0, own_label(): PLENTY, "cores": 4.0, "memory": 1000.0}
    assert worker_process.default_name() == f"{socket.gethostname()}-{os.getpid()}"


def test_the_last_events_of_jobs_are_sent_before_a_worker_retires() -> None:
    """The worker is retired, so that its unfinished jobs do not count as failed attempts."""
    order: list[Any] = []
    site: Any = SimpleNamespace(active=2)

    async def retire(**options: Any) -> None:
        order.append((site.active, options))

    async def pause(seconds: float) -> None:
        order.append("waits")
        site.active = max(0, site.active - 1)

    worker: Any = SimpleNamespace(address="tcp://w", scheduler=SimpleNamespace(retire_workers=retire))
    before, asyncio.sleep = asyncio.sleep, pause  # type: ignore[assignment]
    try:
        asyncio.run(worker_process._leave(worker, site))
    finally:
        asyncio.sleep = before
    assert order[:3] == ["waits"] * 3
    assert order[3] == (0, {"workers": ["tcp://w"], "close_workers": False, "remove": True})


@pytest.mark.parametrize("error", [TimeoutError(), OSError("refused"), ValueError("no\naddress")])
def test_a_scheduler_that_does_not_answer_is_named(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import distributed

    class Absent:
        def __init__(self, *_: object, **options: Any) -> None:
            assert options["memory_limit"] == 0 and options["nthreads"] == 2

        def __await__(self) -> Any:
            raise error

    monkeypatch.setattr(distributed, "Worker", Absent)
    store = Store(tmp_path)
    with pytest.raises(SetupError) as caught:
        worker_process.serve(Address("127.0.0.1:1"), store, Offer("w", 2, 1, {}), print)
    why = " ".join(str(error).split()) or "no answer"
    assert f": {why}; `dask scheduler` starts one" in str(caught.value)
    assert not any((store.root / "tmp").iterdir()), "what it staged is removed"
    sites.clear()
