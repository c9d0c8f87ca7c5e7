"""Tests of the worker program of a cluster: its exit codes, its labels, and the jobs that it refuses."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild.build import cluster
from mlcbuild.build.cluster import site
from mlcbuild.build.cluster.wire import Answer, Order
from mlcbuild.errors import UsageError
from mlcbuild.remotes import Remote
from mlcbuild.store.store import Store
from tests.build.cluster_runs import an_order
from tests.cluster import started

pytestmark = pytest.mark.xdist_group("cluster")


def test_exit_codes_of_a_worker(tmp_path: Path) -> None:
    with started(tmp_path / "cluster") as actual:
        address, actual.address = actual.address, "dask://127.0.0.1:1"
        absent = actual.worker("absent")
        actual.address = address
        process = actual.worker("interrupted")
        lonely = actual.worker("lonely")
        actual.wait("interrupted", "lonely")
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 130
        actual.processes[0].kill()
        assert lonely.wait(200) == 1
        assert "the scheduler dask://127.0.0.1:" in actual.said("lonely")
        assert absent.wait(200) == 3
        assert "no scheduler answers at dask://127.0.0.1:1" in actual.said("absent")
        assert "Traceback" not in actual.said("absent") + actual.said("lonely")


def test_labels() -> None:
    assert cluster.parse_labels(["fast", "gpu=2"]) == {"fast": cluster.PLENTY, "gpu": 2.0}
    for wrong in ("", "gpu=", "gpu=0", "=1", "cores=4", "memory"):
        with pytest.raises(UsageError, match="must be a NAME or NAME=COUNT"):
            cluster.parse_labels([wrong])


def attempt(order: Order, place: Path) -> Answer:
    store = Store(place / "store")
    here = site.Site("w", store, store.staging())
    try:
        output: list[object] = []
        return site._Attempt(here, order, lambda: True, output.append).run()
    finally:
        here.close()


def test_a_worker_refuses_what_would_not_be_what_the_key_says(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    order = replace(an_order(tmp_path / "remote"), remotes=(Remote(f"file://{tmp_path}/remote"),))
    assert attempt(order, tmp_path).lacking == ("0" * 64,)
    image = replace(order.info.preimage, code={**order.info.preimage.code, "tests/actions.py": "0" * 64})
    wrong = attempt(replace(order, info=replace(order.info, preimage=image)), tmp_path)
    assert str(wrong.error) == (
        "step step: the worker w has another mlcbuild (tests/actions.py differs): "
        "install the same mlcbuild there"
    )
    image = replace(order.info.preimage, action="tests.nowhere:act")
    gone = attempt(replace(order, info=replace(order.info, preimage=image)), tmp_path)
    assert "the worker w has no module 'tests.nowhere'" in str(gone.error)
    alone = attempt(replace(order, remotes=()), tmp_path)
    assert "there is no remote that both read and write" in str(alone.error)
