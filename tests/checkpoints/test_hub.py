"""Tests of downloads from the hub: refusals of the hub, and damage during a transfer."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.checkpoints.hub_files import FETCHED, FILES, pins, refusal
from tests.hub import Fault, Hub
from tests.hub_client import Client


def test_files_arrive_verified_and_linked(hub: Hub, client: Client, tmp_path: Path) -> None:
    commit = hub.add("org/good", FILES)
    assert client.call("fetch", "org/good", commit, pins(), str(tmp_path / "one")) == FETCHED
    for name in FETCHED:
        assert (tmp_path / "one" / name).read_bytes() == FILES[name]
        assert not (tmp_path / "one" / name).is_symlink()
    assert not hub.asked("GET", "README.md")
    asked = len(hub.requests)
    assert client.call("fetch", "org/good", commit, pins(), str(tmp_path / "two")) == FETCHED
    assert len(hub.requests) == asked, "what is cached is not asked for again"
    # One copy on disk: the cache and both outputs are links to it.
    assert (tmp_path / "two" / "model.safetensors").stat().st_nlink == 3


def test_a_token_goes_to_the_hub_and_not_to_the_storage_host(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/private", FILES)
    hub.repos["org/private"].token = "hf_secret"
    with Client(tmp_path / "home", hub.address, HF_TOKEN="hf_secret") as client:
        assert client.call("fetch", "org/private", commit, pins(), str(tmp_path / "out")) == FETCHED
    stored = hub.asked("GET", "storage/org/private")
    assert stored and all(request.token is None and request.host == "localhost" for request in stored)


def test_a_broken_transfer_goes_on_where_it_broke(hub: Hub, client: Client, tmp_path: Path) -> None:
    large = bytes(range(256)) * (21 << 12)  # huggingface_hub keeps whole pieces of 10 MiB
    commit = hub.add("org/drops", {"model.safetensors": large})
    hub.repos["org/drops"].faults["model.safetensors"] = Fault("drop", times=1)
    entry = {"model.safetensors": {"size": len(large), "sha256": hashlib.sha256(large).hexdigest()}}
    client.call("fetch", "org/drops", commit, entry, str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == large
    first, second = hub.asked("GET", "storage/org/drops")
    assert first.range is None
    assert second.range == f"bytes={10 << 20}-"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("gated"), "access is restricted; ask for it at {hub}/{repo}, then set HF_TOKEN"),
        (Fault("unauthorized"), "the hub refuses access (HTTP 401); set HF_TOKEN"),
        (Fault("disabled"), "the hub has disabled this repository; use another source"),
        (Fault("no_file"), "there is no such file at this revision; run `mlcbuild lock`"),
        (Fault("status", status=404), "the hub has no such file (HTTP 404)"),
        (Fault("status", status=418), "the hub refuses the request (HTTP 418)"),
        (Fault("short"), "the download ended before the whole file had arrived; try again"),
        pytest.param(
            Fault("xet"),
            "the hub's Xet storage failed (Task error: ",
            marks=pytest.mark.skipif(find_spec("hf_xet") is None, reason="hf_xet is not installed"),
        ),
        (Fault("not_a_hub"), "{hub} does not answer like a hub; check HF_ENDPOINT"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_failed_download_says_which_file_and_what_to_do(
    hub: Hub, client: Client, tmp_path: Path, fault: Fault, message: str
) -> None:
    repo = f"org/{fault.kind}-{fault.status}"
    commit = hub.add(repo, FILES)
    hub.repos[repo].faults["config.json"] = fault
    actual = refusal(client, "fetch", repo, commit, pins("config.json"), str(tmp_path / "out"))
    assert actual.startswith(f"hf://{repo}@{commit}: config.json: ")
    assert message.format(hub=hub.address, repo=repo) in actual


def test_a_missing_repository_and_revision_are_told_apart(hub: Hub, client: Client, tmp_path: Path) -> None:
    hub.add("org/there", FILES)
    message = refusal(client, "fetch", "org/absent", "0" * 40, pins(), str(tmp_path / "out"))
    assert f"{hub.address} has no such repository, or it is private" in message
    message = refusal(client, "fetch", "org/there", "0" * 40, pins(), str(tmp_path / "out"))
    assert "there is no such revision" in message


def test_a_busy_hub_is_asked_three_times(hub: Hub, client: Client, tmp_path: Path) -> None:
    commit = hub.add("org/busy", FILES)
    hub.repos["org/busy"].faults["config.json"] = Fault("status", times=2, status=503)
    client.call("fetch", "org/busy", commit, pins("config.json"), str(tmp_path / "out"))
    hub.repos["org/busy"].faults["tokenizer.json"] = Fault("status", times=3, status=503)
    message = refusal(client, "fetch", "org/busy", commit, pins("tokenizer.json"), str(tmp_path / "out"))
    assert "tokenizer.json: the hub cannot answer now (HTTP 503); try again later" in message


def test_wrong_bytes_are_refused_and_named(hub: Hub, client: Client, tmp_path: Path) -> None:
    commit = hub.add("org/wrong", FILES)
    hub.repos["org/wrong"].faults["model.safetensors"] = Fault("wrong")
    message = refusal(client, "fetch", "org/wrong", commit, pins(), str(tmp_path / "out"))
    pinned = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    assert message.startswith(f"hf://org/wrong@{commit}: model.safetensors: its sha256 is ")
    assert f"the lock says {pinned}" in message and "`mlcbuild lock`" in message
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_damaged_cache_is_replaced(hub: Hub, client: Client, tmp_path: Path) -> None:
    commit = hub.add("org/rotten", FILES)
    hub.repos["org/rotten"].faults["model.safetensors"] = Fault("wrong", times=1)
    client.call("fetch", "org/rotten", commit, pins(), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert len(hub.asked("GET", f"storage/org/rotten/resolve/{commit}/model.safetensors")) == 2


def test_a_file_of_another_size_is_refused(hub: Hub, client: Client, tmp_path: Path) -> None:
    commit = hub.add("org/size", FILES)
    wrong = {"config.json": {"size": 7, "sha256": "0" * 64}}
    message = refusal(client, "fetch", "org/size", commit, wrong, str(tmp_path / "out"))
    assert f"config.json: it has {len(FILES['config.json'])} bytes, the lock says 7" in message


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a/../../b.json", "tokenizer\\..\\x.json"])
def test_a_name_that_leaves_the_directory_is_refused(
    hub: Hub, client: Client, tmp_path: Path, name: str
) -> None:
    entry = {name: {"size": 1, "sha256": "0" * 64}}
    message = refusal(client, "fetch", "org/evil", "0" * 40, entry, str(tmp_path / "out"))
    assert message.startswith(f"hf://org/evil@{'0' * 40}: the file name {name!r} is no plain path")
    assert not hub.asked("HEAD", "org/evil")
