"""Tests of bundles as repositories of a model hub; the real huggingface_hub package talks to a simulated
hub."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlcbuild.bundles.publish.repository import _link_or_copy
from tests.bundles.test_publish import VARIANT, contents
from tests.conftest import checked, mlcbuild
from tests.hub import Fault, Hub

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as actual:
        actual.write_token = "hf_secret"
        yield actual


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    def call(*command: str | Path, token: str = "hf_secret") -> subprocess.CompletedProcess[str]:
        variables = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": token,
            "HF_HUB_DISABLE_XET": "1",  # this hub has none
            "HF_HUB_ETAG_TIMEOUT": "60",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return mlcbuild(*command, store=tmp_path / "store", variables=variables)

    return call


def test_a_bundle_is_published_and_pulled(tiny_bundles: Path, hub: Hub, run: Run, tmp_path: Path) -> None:
    bundle = tiny_bundles / "dist" / VARIANT
    said = checked(run("publish", bundle, "--to", "hf://team/tiny@v1"))
    commit = hub.repos["team/tiny"].refs["v1"]
    assert said.startswith(f"published hf://team/tiny@{commit}  (")
    assert hub.private == {"team/tiny"}, "the owner decides who sees it"
    files = hub.repos["team/tiny"].commits[commit]
    assert {name: files[name] for name in contents(bundle)} == contents(bundle)
    assert files.keys() - contents(bundle).keys() == {"README.md", ".gitattributes"}
    assert [request.path for request in hub.asked("PUT", "lfs/")], "weights go to large-file storage"

    said = checked(run("publish", bundle, "--to", "hf://team/tiny@v1"))
    assert said == f"present   hf://team/tiny@{commit}\n" and hub.repos["team/tiny"].refs["v1"] == commit

    said = checked(run("pull", "hf://team/tiny@v1", tmp_path / "pulled"))
    assert said.splitlines()[1] == f"the immutable address of this content is hf://team/tiny@{commit}"
    assert contents(tmp_path / "pulled") == contents(bundle)
    cached = {path.stat().st_ino for path in (tmp_path / "hf").rglob("blobs/*")}
    for path in (tmp_path / "pulled").rglob("*.*"):
        assert path.stat().st_ino in cached and not path.stat().st_mode & 0o222, "no file is there twice"
    assert checked(run("inspect", tmp_path / "pulled")).startswith("name")
    assert "exactly" not in checked(run("pull", f"hf://team/tiny@{commit}", tmp_path / "pinned"))


def test_files_of_other_users_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "cached"
    cached.write_bytes(b"x")
    _link_or_copy(cached, tmp_path / "mine")
    assert (tmp_path / "mine").samefile(cached)
    monkeypatch.setattr(os, "geteuid", lambda: cached.stat().st_uid + 1)
    _link_or_copy(cached, tmp_path / "theirs")
    assert not (tmp_path / "theirs").samefile(cached) and (tmp_path / "theirs").read_bytes() == b"x"


def test_the_page_says_what_the_manifest_says(tiny_bundles: Path, hub: Hub, run: Run) -> None:
    bundle = tiny_bundles / "dist" / VARIANT
    checked(run("publish", bundle, "--to", "hf://team/tiny"))
    repo = hub.repos["team/tiny"]
    page = repo.commits[repo.refs["main"]]["README.md"].decode()
    manifest = json.loads((bundle / "bundle.json").read_bytes())
    assert page.startswith("---\nlibrary_name: mlcbuild\ntags:\n- mlcbuild\n")
    for fact in (
        f"# {VARIANT}",
        "| scheme | q4f16_1 |",
        manifest["signature"],
        f"| perplexity | {manifest['verification']['perplexity']} |",
        "mlcbuild pull hf://team/tiny bundle",
    ):
        assert fact in page


def test_files_of_an_earlier_bundle_go(tiny_bundles: Path, hub: Hub, run: Run) -> None:
    hub.add("team/tiny", {"old.bin": b"x", "README.md": b"mine", ".gitattributes": b"a"})
    bundle = tiny_bundles / "dist" / VARIANT
    checked(run("publish", bundle, "--to", "hf://team/tiny"))
    repo = hub.repos["team/tiny"]
    files = repo.commits[repo.refs["main"]]
    assert files.keys() == contents(bundle).keys() | {"README.md", ".gitattributes"}
    other = tiny_bundles / "dist" / "tiny-q0f32-host"
    puts = len(hub.asked("PUT", "lfs/"))
    checked(run("publish", other, "--to", "hf://team/tiny"))
    files = repo.commits[repo.refs["main"]]
    assert {name: files[name] for name in contents(other)} == contents(other)
    assert len(hub.asked("PUT", "lfs/")) == puts + 1, "only what differs is sent"


def test_who_may_not_write_is_told(tiny_bundles: Path, hub: Hub, run: Run) -> None:
    result = run("publish", tiny_bundles / "dist" / VARIANT, "--to", "hf://team/tiny", token="hf_other")
    assert result.returncode == 1
    assert "the hub refuses access (HTTP 403); set HF_TOKEN to a token that may write it" in result.stderr
    assert "hf_other" not in result.stderr and hub.repos == {}


def test_a_bundle_that_is_wrong_is_refused(tiny_bundles: Path, hub: Hub, run: Run, tmp_path: Path) -> None:
    good = contents(tiny_bundles / "dist" / VARIANT)
    wrong = {
        "team/short": ({**good, "tokenizer.json": b"{}"}, "the fetched bundle is refused: "),
        "team/lacking": (
            {k: v for k, v in good.items() if "weights" not in k},
            "the fetched bundle is refused",
        ),
        "team/none": ({"config.json": b"{}"}, "it is not a bundle: it holds no bundle.json"),
        "team/more": ({**good, "chat_template.json": b"{}"}, "the manifest does not list this file"),
        "team/device": ({**good, "con": b""}, "the manifest does not list this file"),
        "team/escape": ({**good, "../x": b"{}"}, "is no plain path inside the repository"),
    }
    for repo, (files, words) in wrong.items():
        hub.add(repo, files)
        result = run("pull", f"hf://{repo}", tmp_path / "pulled")
        assert result.returncode == 1 and words in result.stderr and "Traceback" not in result.stderr
        assert not (tmp_path / "pulled").exists()
    assert "there is no such revision" in run("pull", "hf://team/none@v9", tmp_path / "p").stderr
    hub.add("team/busy", good)
    hub.repos["team/busy"].faults[None] = Fault("status", times=1)
    assert checked(run("pull", "hf://team/busy", tmp_path / "busy")), "asked again"
