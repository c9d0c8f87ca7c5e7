"""Tests of copying records between a store and a directory as the remote."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mlcbuild import replication
from mlcbuild.build import plan as planning
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.errors import RemoteError, StoreError
from mlcbuild.remotes import Remote
from mlcbuild.remotes.link import Link, UploadCount
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.staging import StagingArea
from mlcbuild.store.store import Store

GRAPH = Graph(
    [
        Step("weights/a", "tests.actions:text", {"text": "aaaa"}, {}),
        Step("bundle/a", "tests.actions:link", {}, {"w": Input("weights/a")}),
        Step("bench/a", "tests.actions:text", {"text": "here"}, {}, shared=False),
    ]
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    assert execute(GRAPH, store, Options(executor="inline")).ok
    return store


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    directory = tmp_path / "shared"
    directory.mkdir()
    return Remote(directory.as_uri())


def pull(store: Store, remote: Remote) -> replication.Pulled:
    sharing = Sharing(store, [Link(remote)])
    try:
        plan = planning.plan(GRAPH, store, sharing=sharing)
    finally:
        sharing.close()
    return replication.pull(store, plan, [remote], sharing.take_warnings())


def test_records_of_one_machine_stay_there(store: Store) -> None:
    assert {record.info.step for record in replication.stored(store)} == {"weights/a", "bundle/a"}


def test_a_push_counts_what_each_remote_received(store: Store, remote: Remote, tmp_path: Path) -> None:
    pushed = replication.push(store, replication.stored(store), [remote], None)
    assert (pushed.records, pushed.sent[remote.url].records) == (2, 2)
    again = replication.push(store, replication.stored(store), [remote], None)
    assert again == replication.Pushed(2, {remote.url: UploadCount(0, 0)})
    absent = Remote((tmp_path / "absent").as_uri())
    with pytest.raises(RemoteError, match=r"absent is not written to in this run: there is no directory"):
        replication.push(store, replication.stored(store), [remote, absent], None)


def test_a_pull_brings_what_was_pushed(store: Store, remote: Remote, tmp_path: Path) -> None:
    replication.push(store, replication.stored(store), [remote], None)
    here = Store(tmp_path / "here")
    assert pull(here, remote) == replication.Pulled(fetched=2, present=0, absent=1, warnings=())
    assert pull(here, remote) == replication.Pulled(fetched=0, present=2, absent=1, warnings=())


def test_a_full_disk_ends_a_pull_with_the_store_s_error(
    store: Store, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(area: StagingArea) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    replication.push(store, replication.stored(store), [remote], None)
    monkeypatch.setattr(StagingArea, "subdirectory", full)
    with pytest.raises(StoreError, match="no space is left"):
        pull(Store(tmp_path / "here"), remote)


def test_a_pull_fails_when_a_listed_file_does_not_come(store: Store, remote: Remote, tmp_path: Path) -> None:
    replication.push(store, replication.stored(store), [remote], None)
    for blob in (tmp_path / "shared" / "cas").rglob("*"):
        if blob.is_file():
            blob.unlink()
    with pytest.raises(RemoteError, match=r"weights/a: no remote gives text\.txt"):
        pull(Store(tmp_path / "here"), remote)


def test_a_lost_file_is_fetched_again(store: Store, remote: Remote) -> None:
    replication.push(store, replication.stored(store), [remote], None)
    record = next(record for record in replication.stored(store) if record.info.step == "weights/a")
    blob = store.blob(record.files[0].digest)
    blob.unlink()
    assert not replication.verify(store).check.ok
    checked = replication.verify(store, [remote])
    assert checked.check.ok and checked.check.mended and not checked.warnings
    assert blob.read_text() == "aaaa"
