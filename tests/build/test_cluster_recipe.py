"""Tests that workers of a cluster build a real recipe: they fetch, convert, compile, bundle and verify."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests.build.test_cluster import trees
from tests.cluster import started
from tests.conftest import QUICKSTART, ROOT, TINY, checked, mlcbuild, project
from tests.hub import Hub

pytestmark = pytest.mark.xdist_group("cluster")


def test_a_recipe_is_built_by_a_cluster_and_used_without_it(
    tiny_bundles: Path, common_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a cluster builds the same bytes as one machine, where every worker has a separate store and
    a shared directory transports results."""
    text = QUICKSTART.replace("[q0f32, q4f16_1, q4a8_1]", "[q4f16_1]").replace("./tiny", "hf://org/tiny@main")
    recipe = project(
        tmp_path / "recipe", f"{text}cache: {{remotes: [{{url: '{tmp_path.as_uri()}/cache'}}]}}\n"
    )
    shutil.copy(ROOT / "recipes" / "prompts" / "tiny.txt", recipe.parent / "prompts.txt")
    cache, here = tmp_path / "cache", tmp_path / "here"
    cache.mkdir()
    with Hub() as hub:
        hub.add("org/tiny", {path.name: path.read_bytes() for path in TINY.iterdir()})
        for name, value in (
            ("ENDPOINT", hub.address),
            ("HOME", str(tmp_path / "hf")),
            ("HUB_DISABLE_XET", "1"),
        ):
            monkeypatch.setenv(f"HF_{name}", value)
        checked(mlcbuild("lock", recipe, store=here))
        with started(tmp_path / "cluster") as actual:
            for name in ("one", "two"):
                actual.worker(name)
            actual.wait("one", "two")
            said = mlcbuild("run", recipe, "--executor", actual.address, "--json", store=here)
            document = json.loads(checked(said))
    assert {step["status"] for step in document["steps"]} == {"built"} and "warning" not in said.stderr
    kinds = {step["name"].partition("/")[0] for step in document["steps"]}
    assert kinds >= {"fetch", "config", "tokenizer", "weights", "library", "bundle", "verify"}
    workers = {line.rpartition(" on ")[2] for line in said.stderr.splitlines() if line.startswith("begin ")}
    assert workers == {"one", "two"}
    local, remote = trees(common_store), trees(cache)
    shared = local.keys() & remote.keys()
    assert {key: remote[key] for key in shared} == {key: local[key] for key in shared}
    # The keys of some steps have less code where the model's type was known before its download.
    files = set(local.values())
    names = {step["name"].partition("/")[0] for step in document["steps"] if remote[step["key"]] in files}
    assert names >= {"config", "tokenizer", "weights", "library", "reference"}
    assert all(verify(Store(place)).ok for place in (here, tmp_path / "cluster" / "one"))
    other = json.loads(checked(mlcbuild("run", recipe, "--json", store=tmp_path / "other")))
    assert {step["status"] for step in other["steps"]} == {"reused"}
    (bundle,) = (Path(variant["bundle"]) for variant in other["variants"])
    assert (bundle / "model.so").read_bytes() == (
        tiny_bundles / "dist" / "tiny-q4f16_1-host" / "model.so"
    ).read_bytes()
