"""Tests of digests: canonical JSON, digests of files and trees, keys and import closures. Their golden values
change only on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import MappingProxyType

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild import canon
from mlcbuild.canon import Entry, Tree

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_canonical_json_reads_back_as_the_same_value(value: object) -> None:
    assert json.loads(canon.canonical(value)) == value


@given(st.dictionaries(TEXT, VALUES, max_size=5), st.randoms())
def test_canonical_json_does_not_depend_on_the_order_of_keys(
    value: dict[str, object], random: Random
) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canon.canonical(dict(items)) == canon.canonical(value)


@given(VALUES, VALUES)
def test_different_values_have_different_texts(one: object, other: object) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (canon.canonical(one) == canon.canonical(other)) == same


def test_canonical_json_is_exactly_this() -> None:
    value = {"b": [1, True, None, "é\n"], "a": {"\U0001f600": 0, "\uffff": -1}, "": []}
    expected = '{"":[],"a":{"\uffff":-1,"\U0001f600":0},"b":[1,true,null,"é\\n"]}'
    assert canon.canonical(value).decode() == expected
    assert canon.canonical(MappingProxyType(value)) == canon.canonical(value)
    assert canon.canonical((1, (2,))) == b"[1,[2]]"


@pytest.mark.parametrize("value", [1.0, {"a": [0.5]}, float("nan"), {1: "a"}, b"bytes", {"a": {1, 2}}])
def test_canonical_json_refuses_what_has_no_one_text(value: object) -> None:
    with pytest.raises(TypeError, match="canonical JSON"):
        canon.canonical(value)


def test_canonical_json_refuses_text_without_utf8_form() -> None:
    with pytest.raises(ValueError, match="must be UTF-8"):
        canon.canonical({"name": "\udc80"})


def test_digest_is_tagged() -> None:
    assert canon.digest("t/1", {"a": 1}) == blake3(b't/1\0{"a":1}').hexdigest()
    assert canon.digest("t/1", 1) != canon.digest("t/2", 1)


@pytest.mark.parametrize("data", [b"", b"x", b"many bytes" * 10_000])
def test_file_digest_is_that_of_the_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    assert canon.file_digest(path) == canon.bytes_digest(data) == blake3(data).hexdigest()


def test_a_large_file_has_the_same_digest_on_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(canon._MANY_THREADS + 1)
    assert canon.file_digest(path) == blake3(bytes(canon._MANY_THREADS + 1)).hexdigest()


ENTRIES = st.lists(
    st.builds(Entry, TEXT, st.text("0123456789abcdef", min_size=4, max_size=4), st.integers(0, 9)),
    max_size=6,
    unique_by=lambda entry: entry.path,
)


@given(ENTRIES, st.randoms())
def test_a_tree_has_one_digest_in_every_order(entries: list[Entry], random: Random) -> None:
    shuffled = list(entries)
    random.shuffle(shuffled)
    assert Tree.of(shuffled) == Tree.of(entries)


@given(ENTRIES, ENTRIES)
def test_trees_that_differ_have_different_digests(one: list[Entry], other: list[Entry]) -> None:
    assert (Tree.of(one).digest == Tree.of(other).digest) == (sorted(one) == sorted(other))


def test_golden_digests() -> None:
    """Checks the digests of fixed values: if one changed, every stored result of every user would be built
    again."""
    entries = [Entry("b.txt", "22" * 32, 2), Entry("a/c.bin", "11" * 32, 10**12)]
    assert canon.tree_digest(entries) == GOLDEN["tree"]
    assert canon.salt({"a.py": "00" * 32}, {"tool": "1.2"}) == GOLDEN["salt"]
    key = canon.step_key("m:f", canon.canonical({"scheme": {"bits": 4}}), "aa" * 32, {"config": "bb" * 32})
    assert key == GOLDEN["key"]


def test_a_key_is_the_hash_of_its_documented_pre_image() -> None:
    params, inputs = {"x": [1, {"y": None}]}, {"b": "11", "a": "22"}
    text = canon.canonical(["step/1", 'odd "action"', params, "cc" * 32, inputs])
    actual = canon.step_key('odd "action"', canon.canonical(params), "cc" * 32, inputs)
    assert actual == blake3(text).hexdigest()


GOLDEN = {
    "tree": "40a88c7367a7504f8b82bdd1091738bf60550e751efeddb9fccf333ff0d07698",
    "salt": "1f37963c4b5311ba4290722c11cf0268ba27b26aef5b3eff136f67aa4a56ffd1",
    "key": "0902c5f72038cf1253871ed17818adbc735a63f500ad9bfbacc7b84f67e4f7b5",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a package whose module `start` contains every kind of import, adds it to the import path, and
    returns its directory."""
    root = tmp_path / f"pkg_{tmp_path.name.replace('-', '_')}"
    (root / "deep").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "deep" / "__init__.py").write_text("from . import leaf\n")
    (root / "deep" / "leaf.py").write_text("import json\n")
    (root / "late.py").write_text("")
    (root / "handled.py").write_text("")
    (root / "matched.py").write_text("")
    (root / "alone.py").write_text("")
    name = root.name
    (root / "start.py").write_text(
        f"import json\nfrom {name} import deep\n"
        "def f(x):\n"
        "    with x:\n"
        "        from .late import thing\n"
        "    try:\n        pass\n    except Exception:\n        from . import handled\n"
        "    match x:\n        case 1:\n"
        f"            import {name}.matched\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return root


def test_the_import_closure_follows_every_kind_of_import(package: Path) -> None:
    files = canon.code_files(f"{package.name}.start")
    expected = ["__init__", "deep/__init__", "deep/leaf", "handled", "late", "matched", "start"]
    assert list(files) == [f"{package.name}/{name}.py" for name in expected]
    assert all(digest == canon.file_digest(package.parent / name) for name, digest in files.items())


def test_the_import_closure_sees_a_change_in_this_process(package: Path) -> None:
    before = canon.code_files(f"{package.name}.start")
    (package / "deep" / "leaf.py").write_text(f"import {package.name}.alone\n")
    after = canon.code_files(f"{package.name}.start")
    assert f"{package.name}/alone.py" in after
    assert {name for name in before if before[name] != after[name]} == {f"{package.name}/deep/leaf.py"}


def test_a_file_whose_imports_are_remembered_is_hashed_and_not_parsed(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports: canon.ImportTable = {}
    before = canon.code_files(f"{package.name}.start", imports=imports)
    monkeypatch.setattr(canon, "ast", None)
    assert canon.code_files(f"{package.name}.start", imports={}) == before, "this process has parsed it"
    monkeypatch.setattr(canon, "_imported", {})
    assert canon.code_files(f"{package.name}.start", imports=imports) == before
    # The same bytes import other modules from a file of another package.
    source = (package / "deep" / "__init__.py").read_bytes()
    assert (canon.bytes_digest(source), f"{package.name}.deep") in imports
    (package / "handled.py").write_bytes(source)
    with pytest.raises(AttributeError):
        canon.code_files(f"{package.name}.start", imports=imports)


def test_the_import_closure_of_our_own_code_has_portable_names() -> None:
    files = canon.code_files("mlcbuild.canon")
    assert set(files) >= {"mlcbuild/__init__.py", "mlcbuild/canon.py"}
    assert not any(name.startswith("/") for name in files)
    assert canon.code_files("nothing_of_this_name.module") == {}
