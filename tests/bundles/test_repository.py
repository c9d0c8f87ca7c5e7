"""Tests of bundles as repositories of a hub in memory: which files are committed, and what is fetched."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from mlcbuild_format import bundle as form

from mlcbuild.bundles.provenance import STATEMENT
from mlcbuild.bundles.publish import repository, transfer_bundle, uploads
from mlcbuild.bundles.publish.repository import fetch, push
from mlcbuild.checkpoints import hub
from mlcbuild.checkpoints.hub import HubFile, HubSource
from mlcbuild.checkpoints.hub_failures import AbsentError
from mlcbuild.errors import PublishError, RemoteError, SourceError
from tests.bundles.bundle_files import contents_of, write_bundle

ADDRESS = "hf://team/tiny@v1"


def described(name: str, data: bytes) -> HubFile:
    """Returns what a model hub lists for a file with the content `data`: its size and hashes. A name that
    ends in .bin stands for a file in large-file storage, which has a SHA-256 digest; other files have their
    Git blob hash."""
    if name.endswith(".bin"):
        return HubFile(len(data), "0" * 40, hashlib.sha256(data).hexdigest())
    return HubFile(len(data), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), None)


class MemoryHub:
    """A simulated model hub in memory, with one repository, which has no commit at first. It records the
    files and messages of all commits."""

    def __init__(self, cache: Path) -> None:
        self.commits: list[dict[str, bytes]] = []
        self.messages: list[str] = []
        self.reached: list[str] = []
        self._cache = cache

    @property
    def commit_id(self) -> str:
        return f"{len(self.commits):040x}"

    def list_files(self, source: HubSource) -> tuple[str, dict[str, HubFile]]:
        assert source.repo == "team/tiny"
        if not self.commits:
            raise AbsentError("it is not there")
        return self.commit_id, {name: described(name, data) for name, data in self.commits[-1].items()}

    def current_commit(self, source: HubSource) -> str:
        return self.commit_id

    def commit(
        self, source: HubSource, files: Mapping[str, Path | bytes], gone: Iterable[str], message: str
    ) -> str:
        assert source == HubSource("team/tiny", "v1")
        added = {name: data if isinstance(data, bytes) else data.read_bytes() for name, data in files.items()}
        before = self.commits[-1] if self.commits else {}
        self.commits.append({name: data for name, data in (before | added).items() if name not in gone})
        self.messages.append(message)
        return self.commit_id

    def reach(self, source: HubSource, names: Iterable[str]) -> None:
        assert source.is_pinned
        self.reached += names

    def download(self, source: HubSource, name: str) -> Path:
        assert source.is_pinned
        path = self._cache / name.replace("/", "-")
        path.write_bytes(self.commits[-1][name])
        return path


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryHub:
    (tmp_path / "cache").mkdir()
    memory = MemoryHub(tmp_path / "cache")
    for name in ("list_files", "current_commit", "commit", "reach", "download"):
        monkeypatch.setattr(hub, name, getattr(memory, name))
    return memory


def pushed(bundle: Path, **changes: bytes) -> tuple[str, int]:
    manifest, files = write_bundle(bundle, **changes)
    return push(bundle, manifest, files, ADDRESS, None)


def test_a_bundle_comes_back_as_it_was(memory: MemoryHub, tmp_path: Path) -> None:
    address, sent = pushed(tmp_path / "a")
    assert address == f"hf://team/tiny@{memory.commit_id}"
    assert sent == sum(map(len, contents_of(tmp_path / "a").values()))
    assert memory.messages == ["tiny-q0f32-host, built by mlcbuild"]
    assert memory.commits[-1].keys() - contents_of(tmp_path / "a").keys() == {"README.md"}
    (tmp_path / "out").mkdir()
    names = frozenset(contents_of(tmp_path / "a"))
    assert fetch(ADDRESS, tmp_path / "out") == (address, names)
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "a")
    assert {*memory.reached} == names
    assert (tmp_path / "out" / "model.so").samefile(tmp_path / "cache" / "model.so"), "no file is there twice"


def test_only_changes_are_committed(memory: MemoryHub, tmp_path: Path) -> None:
    address, _ = pushed(tmp_path)
    assert pushed(tmp_path) == (address, 0) and len(memory.commits) == 1
    _, sent = pushed(tmp_path, model=b"more")
    assert sent == 4 + (tmp_path / "bundle.json").stat().st_size, "of the same size, with other bytes"
    assert (
        pushed(tmp_path, model=b"more", weights=b"x" * 63)[1]
        == 63 + (tmp_path / "bundle.json").stat().st_size
    )
    memory.commits[-1]["README.md"] = b"changed"
    assert pushed(tmp_path, model=b"more", weights=b"x" * 63)[1] == 0 and len(memory.commits) == 4, (
        "the card is written anew"
    )
    assert b"changed" not in memory.commits[-1]["README.md"]


def test_files_of_an_earlier_bundle_are_removed(memory: MemoryHub, tmp_path: Path) -> None:
    pushed(tmp_path)
    memory.commits[-1] |= {"old.bin": b"x", ".gitattributes": b"y"}
    assert pushed(tmp_path)[1] == 0
    assert memory.commits[-1].keys() == {*contents_of(tmp_path), "README.md", ".gitattributes"}


def test_the_digest_of_a_small_file_is_git_s() -> None:
    command = ["git", "hash-object", "--stdin"]
    expected = subprocess.run(command, input=b"a\0b", capture_output=True, check=True).stdout.decode().strip()
    assert repository._git_oid(b"a\0b") == expected


def test_the_card_names_the_sources_of_the_provenance(memory: MemoryHub, tmp_path: Path) -> None:
    uris = ["hf://org/a@1/config.json", "hf://org/a@1/model.bin", "file:///x/y", "hf://org/b@2/in/c.gguf"]
    dependencies = [{"uri": uri} for uri in uris]
    statement = {"predicate": {"buildDefinition": {"resolvedDependencies": [*dependencies, {}]}}}
    (tmp_path / STATEMENT).write_text(json.dumps(statement))
    pushed(tmp_path)
    card = memory.commits[-1]["README.md"].decode()
    assert "base_model:\n- org/a\n- org/b\n" in card
    assert [line for line in card.splitlines() if "made from" in line] == [
        "| made from | hf://org/a@1 |",
        "| made from | hf://org/b@2 |",
    ]
    for odd in ("{", "[]", '{"predicate": {"buildDefinition": {"resolvedDependencies": [5]}}}'):
        (tmp_path / STATEMENT).write_text(odd)
        pushed(tmp_path)
        assert "base_model" not in memory.commits[-1]["README.md"].decode()


def test_a_repository_that_is_no_bundle_is_refused(memory: MemoryHub, tmp_path: Path) -> None:
    memory.commits.append({"model.so": b"x", "README.md": b"y"})
    with pytest.raises(RemoteError, match=r"it is not a bundle: it holds no bundle\.json"):
        fetch(ADDRESS, tmp_path)
    memory.commits.append({"bundle.json": b"{}", "bundle.json/x": b"y"})
    with pytest.raises(RemoteError, match=r"'bundle\.json' as a file and as a directory"):
        fetch(ADDRESS, tmp_path)
    assert memory.reached == []


def test_a_failure_of_the_hub_does_not_stop_the_others(
    memory: MemoryHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "hf://team/closed@main: the hub refuses access (HTTP 403); set HF_TOKEN to a token"

    def list_files(source: HubSource) -> tuple[str, dict[str, HubFile]]:
        if source.repo == "team/closed":
            raise SourceError(message)
        return memory.list_files(source)

    monkeypatch.setattr(hub, "list_files", list_files)
    manifest, _ = write_bundle(tmp_path / "bundle")
    monkeypatch.setattr(form, "check", lambda path, full: manifest)  # It has no real library.
    sent = uploads.publish_bundle(tmp_path / "bundle", ["hf://team/closed", ADDRESS])
    assert [each.status for each in sent] == ["failed", "published"]
    assert sent[0].note == message and sent[1].address == f"hf://team/tiny@{memory.commit_id}"
    with pytest.raises(PublishError) as caught:
        transfer_bundle.pull("hf://team/closed", tmp_path / "out")
    assert str(caught.value) == message and not (tmp_path / "out").exists()
