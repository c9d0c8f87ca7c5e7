"""Tests that no byte is hashed twice between a source and a bundle."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mlcbuild import canon
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Node, Source, Step
from mlcbuild.bundles import assemble
from mlcbuild.store import statcache, store
from mlcbuild.store.store import Store


def test_each_byte_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: Counter[int] = Counter()
    real = canon.file_digest

    def counted(path: Path) -> str:
        hashed[path.stat().st_size] += 1
        return real(path)

    for module in (assemble, statcache, store):
        monkeypatch.setattr(module, "file_digest", counted)
    (tmp_path / "source").write_bytes(b"s" * 11)
    nodes: list[Node] = [
        Source("source", tmp_path, ("source",)),
        Step("big", "tests.actions:big", {"bytes": 5_000_000}, {"of": Input("source")}),
        *(Step(f"bundle/{n}", "tests.actions:listing", {"n": n}, {"of": Input("big")}) for n in range(3)),
    ]
    result = execute(Graph(nodes), Store(tmp_path / "store"), Options(executor="inline"))
    assert result.ok
    # The file that three bundles share once; what each adds, once for each.
    listed = result.steps[-1].record
    assert listed is not None
    sizes = {entry.path: entry.size for entry in listed.files}
    assert hashed == {11: 1, 5_000_000: 1, 4000: 3, sizes["files.json"]: 3}
    digests = {entry.path: entry.digest for entry in listed.files}
    said = json.loads(
        (tmp_path / "store/cas" / digests["files.json"][:2] / digests["files.json"]).read_bytes()
    )
    assert said == {name: digests[name] for name in ("big.bin", "more.bin")}


def test_what_was_said_of_a_file_ends_with_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    canon.note_digest(path, "1" * 64)
    assert canon.noted_digest(path) == "1" * 64
    path.write_bytes(b"four")
    assert canon.noted_digest(path) is None
    canon.note_digest(path, "2" * 64)
    canon.forget_digests()
    assert canon.noted_digest(path) is None
