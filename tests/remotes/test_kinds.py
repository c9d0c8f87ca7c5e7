"""Tests of the table of kinds of remotes: the interface that a kind from another package must implement is
sufficient."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlcbuild.bundles import publish
from mlcbuild.bundles.publish import transfer_bundle
from mlcbuild.errors import PublishError
from mlcbuild.remotes import fault, kinds, normal
from mlcbuild.remotes.kinds import Destination, connect
from tests.conftest import project
from tests.guide import example
from tests.remotes.users import BUILT, REUSED, User, statuses

Shelves = dict[str, dict[str, bytes]]
"""The contents of simulated remotes (stores elsewhere), as URL of a remote -> name of an object -> its
content."""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Shelves:
    """Adds the example kind of remote of mlcbuild/README.md for this test, and returns the contents of its
    remotes: URL -> name -> content."""
    monkeypatch.setitem(kinds.KINDS, "toy", kinds.KINDS["file"])  # the end of the test removes what is added
    names: dict[str, Any] = {"__name__": __name__}
    exec(example("Extend: a kind of remote"), names)
    shelves: Shelves = names["SHELVES"]
    module = types.ModuleType("toy_publisher")

    def push(
        bundle: Path, manifest: object, files: Mapping[str, int], to: str, observed: object
    ) -> tuple[str, int]:
        shelves[to] = {name: (bundle / name).read_bytes() for name in files}
        return f"{to}#1", sum(files.values())

    def fetch(source: str, directory: Path) -> tuple[str, frozenset[str]]:
        for name, data in shelves[source].items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        return f"{source}#1", frozenset(shelves[source])

    module.push, module.fetch = push, fetch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_publisher", module)
    place = Destination(
        "a shelf", lambda url, writing: names["fault"](url), lambda url: False, "toy_publisher"
    )
    kinds.KINDS["toy"] = replace(kinds.KINDS["toy"], takes_query=True, publishes=place)
    return shelves


def test_a_build_shares_its_results_through_a_kind_from_outside(toy: Shelves, tmp_path: Path) -> None:
    url = "toy://shelf/x?colour=red"
    assert fault(url) == "" and fault("toy://other") == "'toy://other' is no shelf"
    first = User(tmp_path / "one", url)
    assert statuses(first.run()) == BUILT and first.warnings() == []
    assert sum(name.startswith("ac/") for name in toy[url]) == 3
    second = User(tmp_path / "two", url)
    result = second.run()
    assert statuses(result) == REUSED and second.text(result, "c") == "C\nB\nA" and second.warnings() == []


@pytest.mark.usefixtures("toy")
def test_a_recipe_names_a_kind_from_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlcbuild.cli import main

    text = (
        "version: 1\nname: x\nmodels: {tiny: ./tiny}\nquantizations: [q4f16_1]\ntargets: [x86-64-v3]\n"
        "cache: {remotes: [{url: 'toy://shelf/x'}]}\npublish: [{to: 'toy://shelf/{model}'}]\n"
    )
    recipe = project(tmp_path, text)
    assert main(["validate", str(recipe)]) == 0
    recipe.write_text(text.replace("toy://shelf", "toy://floor"))
    capsys.readouterr()
    assert main(["validate", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "'toy://floor/x' is no shelf" in said and "'toy://floor/tiny' is no shelf" in said


@pytest.mark.usefixtures("toy")
def test_a_bundle_is_published_to_a_kind_from_outside(tiny_bundles: Path, tmp_path: Path) -> None:
    bundle, url = tiny_bundles / "dist" / "tiny-q4f16_1-host", "toy://shelf/bundle"
    assert publish.fault(url, writing=True) == ""
    assert transfer_bundle.publish(bundle, url).url == f"{url}#1"
    address, manifest = transfer_bundle.pull(url, tmp_path / "out")
    assert address == f"{url}#1" and manifest.name == bundle.name
    assert (tmp_path / "out" / "bundle.json").read_bytes() == (bundle / "bundle.json").read_bytes()


def test_equal_addresses_have_one_form() -> None:
    assert normal("HTTPS://cache.example/mlc//") == "https://cache.example/mlc"
    assert normal("toy:///a/b/") == "toy:///a/b", "also of a kind that urllib does not know"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://Cache.Example:8443/Team/MLC", "https://cache.example:8443/Team/MLC"),
        ("http://[2001:DB8::A]:80/X", "http://[2001:db8::a]:80/X"),
        ("https://CACHE.example", "https://cache.example"),
        ("oci://Registry.Example/name?plain-http=true", "oci://registry.example/name?plain-http=true"),
        ("s3://bucket?endpoint=https://Other.Example/A", "s3://bucket?endpoint=https://Other.Example/A"),
        ("file:///Home/Cache/", "file:///Home/Cache"),
    ],
)
def test_only_hosts_are_the_same_in_either_case(url: str, expected: str) -> None:
    assert not fault(url) and normal(url) == expected
    user = url.replace("://", "://Ann@", 1)
    assert "must not hold a user name" in fault(user), "what has a case of its own stands in no valid host"


@pytest.mark.usefixtures("toy")
def test_messages_list_the_kinds_of_the_table() -> None:
    *others, last = [kind.form for kind in kinds.KINDS.values() if kind.connect is not None]
    assert last == "toy://" and {"https://", "http://", "s3://", "oci://", "file:///"} <= set(others)
    assert fault("ftp://x").endswith(f"must start with {', '.join(others)} or {last}")
    words = "must start with oci:// (a registry) or hf:// (a model hub) or toy:// (a shelf)"
    assert publish.fault("ftp://x", writing=True).endswith(words)


@pytest.mark.parametrize(
    "url", ["hf://a/b", "ftp://x", "x", "", "://", "http://[", "oci://h:x/y", "http://h:99999"]
)
def test_what_is_no_cache_is_refused(url: str) -> None:
    assert fault(url)


@pytest.mark.parametrize(
    "url", ["file:///x", "s3://bucket", "oci://[/x:v", "oci://h:x/y:v", "x", "", "hf://"]
)
def test_what_is_no_destination_is_refused(url: str) -> None:
    assert publish.fault(url, writing=True)


def test_every_kind_connects_or_publishes(tmp_path: Path) -> None:
    for scheme, kind in kinds.KINDS.items():
        assert kind.form.startswith(f"{scheme}://")
        assert (kind.fault is None) == (kind.connect is None)
        assert kind.connect is not None or kind.publishes is not None
        if kind.publishes is not None:
            assert {"push", "fetch"} <= vars(kind.publishes.load()).keys()
    (tmp_path / "x").mkdir()
    assert connect((tmp_path / "x").as_uri()).size("cas/x") is None


def test_a_bundle_with_a_file_that_its_manifest_does_not_list_is_refused(
    toy: Shelves, tiny_bundles: Path, tmp_path: Path
) -> None:
    url = "toy://shelf/bundle"
    transfer_bundle.publish(tiny_bundles / "dist" / "tiny-q4f16_1-host", url)
    toy[url][".git/config"] = b"[core]"
    with pytest.raises(PublishError, match=r"refused: .*manifest does not list"):
        transfer_bundle.pull(url, tmp_path / "out")
    assert not (tmp_path / "out").exists()
