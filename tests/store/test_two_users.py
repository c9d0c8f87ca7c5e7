"""Tests of two users of one shared cache, each with a separate home directory, store, key and environment."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlcbuild import keyfile
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests.caches import NGINX, WITHOUT_NGINX, Nginx, nginx
from tests.conftest import QUICKSTART, ROOT, checked, mlcbuild, project

RECIPE = QUICKSTART.replace("[q0f32, q4f16_1, q4a8_1]", "[q4f16_1]")


@pytest.fixture(scope="module")
def filled(
    tiny_bundles: Path, common_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Nginx, str]]:
    """Yields (a cache that the first user has filled, the public part of that user's key)."""
    if NGINX is None:
        pytest.skip(WITHOUT_NGINX)
    place = tmp_path_factory.mktemp("cache")
    key = keyfile.create(place / "key.pem")
    with nginx(place / "nginx") as server:
        sent = mlcbuild(
            *("cache", "push", tiny_bundles / "recipe.yaml", server.url),
            store=common_store,
            variables={"MLCBUILD_KEY": str(place / "key.pem")},
        )
        checked(sent)
        yield server, key.public


def machine(place: Path, cache: str) -> Path:
    """Copies the project to a separate directory, and returns the path of the recipe in it."""
    place.mkdir(parents=True)
    recipe = project(place, f"{RECIPE}cache: {{remotes: [{cache}]}}\n")
    shutil.copy(ROOT / "recipes" / "prompts" / "tiny.txt", place / "prompts.txt")
    return recipe


ENVIRONMENTS = {
    "another home and time": {
        "HOME": "{place}/home",
        "XDG_CACHE_HOME": "{place}/cache",
        "TZ": "Pacific/Kiritimati",
        "PYTHONHASHSEED": "7",
    },
    "another language": {
        "LC_ALL": "tr_TR.UTF-8",
        "LANG": "tr_TR.UTF-8",
        "CI": "true",
        "GITHUB_ACTIONS": "true",
    },
    "a long way": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "relative": {"PYTHONOPTIMIZE": "1"},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_second_user_builds_nothing(name: str, filled: tuple[Nginx, str], tmp_path: Path) -> None:
    server, public = filled
    place = tmp_path / ("ä long/wäy with spaces/" * 3 if name == "a long way" else "second")
    recipe = machine(place, f"{{url: '{server.url}', mode: read, trust: ['{public}']}}")
    variables = {key: text.format(place=tmp_path) for key, text in ENVIRONMENTS[name].items()}
    before = os.umask(0o077 if name.startswith("another home") else 0o022)
    try:
        result = mlcbuild(
            *("run", "recipe.yaml" if name == "relative" else recipe, "--json"),
            store=tmp_path / "store",
            cwd=place if name == "relative" else tmp_path,
            variables=variables,
        )
    finally:
        os.umask(before)
    document = json.loads(checked(result))
    assert {step["status"] for step in document["steps"]} == {"reused"}, result.stderr
    assert "warning" not in result.stderr and verify(Store(tmp_path / "store")).ok
    assert (place / "dist" / "tiny-q4f16_1-host" / "bundle.json").is_file()


def test_nothing_is_taken_from_who_is_not_trusted(filled: tuple[Nginx, str], tmp_path: Path) -> None:
    """Checks that unsigned results are refused by a pull, also if the command names the remote's address
    again, by a run, and by a repair."""
    server, public = filled
    stranger = "ed25519:" + "A" * 43
    recipe = machine(tmp_path / "second", f"{{url: '{server.url}', mode: read, trust: ['{stranger}']}}")
    store = tmp_path / "store"
    for more in ((), (server.url,), (server.url, "--trust", stranger)):
        pulled = mlcbuild("cache", "pull", recipe, *more, store=store)
        assert pulled.returncode != 0 and "it is not signed by a trusted key" in pulled.stderr, more
    assert not list((store / "ac").glob("*/*"))
    taken = mlcbuild("cache", "pull", recipe, server.url, "--trust", public, store=store)
    assert checked(taken).startswith("7 fetched, 0 were here, ")


def test_a_pull_from_a_cache_that_is_down_says_so(tmp_path: Path) -> None:
    recipe = machine(tmp_path / "second", "{url: 'http://127.0.0.1:9'}")
    pulled = mlcbuild("cache", "pull", recipe, store=tmp_path / "store")
    assert pulled.returncode != 0 and pulled.stdout == ""
    assert "http://127.0.0.1:9 is not used in this run: Connection refused" in pulled.stderr
