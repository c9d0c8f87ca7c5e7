"""Tests of recipe.lock: its text, reading it, differences from the recipe, and pinning with a hub."""

from __future__ import annotations

import hashlib
import json
import resource
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlcbuild.checkpoints import lock
from mlcbuild.checkpoints.fetch import INDEX, Pinned
from mlcbuild.checkpoints.hub import HubFile, HubSource
from mlcbuild.checkpoints.lock import Lock, Locked
from mlcbuild.errors import InputError, SourceError, UsageError
from tests.hub import Fault, Hub
from tests.hub_client import Client, RefusedError

COMMIT = "0123456789abcdef" * 2 + "01234567"
TINY = HubSource("org/tiny")
LOCK = Lock(
    {TINY: Locked(COMMIT, {"config.json": Pinned(3, "a" * 64), "model.safetensors": Pinned(8, "b" * 64)})}
)
TEXT = f"""\
# Pins what the recipe's sources are. Written by `mlcbuild lock`; commit it, do not edit it.
version: 1
sources:
  "hf://org/tiny@main":
    commit: "{COMMIT}"
    files:
      "config.json": {{size: 3, sha256: "{"a" * 64}"}}
      "model.safetensors": {{size: 8, sha256: "{"b" * 64}"}}
"""
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 16,
    "pytorch_model.bin": b"pickle",
}
SHARDS = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model-00003-of-00002.safetensors": b"left over",
    INDEX: json.dumps(
        {"weight_map": {f"t{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
    ).encode(),
}


def test_the_text_of_a_lock_is_fixed(tmp_path: Path) -> None:
    path = tmp_path / lock.NAME
    assert lock.write(path, LOCK)
    assert path.read_text() == TEXT
    assert lock.read(path) == LOCK
    assert not lock.write(path, LOCK), "an equal lock is not written again"
    assert [item.name for item in tmp_path.iterdir()] == [lock.NAME]


def test_a_recipe_without_hub_sources_has_an_empty_lock(tmp_path: Path) -> None:
    lock.write(tmp_path / lock.NAME, Lock())
    assert lock.read(tmp_path / lock.NAME) == Lock()


def test_a_quotation_mark_in_the_name_of_a_gguf_file(tmp_path: Path) -> None:
    source = HubSource("org/name", "main", 'the "best".gguf')
    written = Lock({source: Locked(COMMIT, {source.file: Pinned(3, "a" * 64)})})
    lock.write(tmp_path / lock.NAME, written)
    assert lock.read(tmp_path / lock.NAME) == written


HEX = "0123456789abcdef"
NAMES = st.text(
    st.characters(categories=["L", "N", "P", "S"], exclude_characters="\\/:"), min_size=1, max_size=20
)
PINNED = st.builds(Pinned, st.integers(0, 2**50), st.text(HEX, min_size=64, max_size=64))
SOURCES = st.builds(
    HubSource,
    st.from_regex(r"[a-z0-9]{1,8}/[A-Za-z0-9]([A-Za-z0-9._]?[A-Za-z0-9]){0,6}", fullmatch=True),
    st.from_regex(r"[A-Za-z0-9_+-]{1,12}(/[A-Za-z0-9]{1,5})?", fullmatch=True),
)
LOCKS = st.builds(
    Lock,
    st.dictionaries(
        SOURCES,
        st.builds(
            lambda commit, files: Locked(commit, files | {"config.json": Pinned(1, "0" * 64)}),
            st.text(HEX, min_size=40, max_size=40),
            st.dictionaries(NAMES.filter(lambda name: name not in (".", "..", "<<")), PINNED, max_size=4),
        ),
        max_size=4,
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(LOCKS)
def test_every_lock_is_read_back_and_is_plain_yaml(tmp_path: Path, created: Lock) -> None:
    path = tmp_path / lock.NAME
    lock.write(path, created)
    assert lock.read(path) == created
    assert lock.text(Lock(dict(reversed(list(created.sources.items()))))) == lock.text(created)
    plain = yaml.safe_load(path.read_text())
    assert {source: entry["commit"] for source, entry in plain["sources"].items()} == {
        str(source): locked.commit for source, locked in created.sources.items()
    }


def test_params_of_the_fetch_step_do_not_name_the_branch() -> None:
    assert LOCK.sources[TINY].params(TINY) == {
        "repo": "org/tiny",
        "commit": COMMIT,
        "files": {
            "config.json": {"size": 3, "sha256": "a" * 64},
            "model.safetensors": {"size": 8, "sha256": "b" * 64},
        },
    }


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ("version: 1", "version: 2", "2:1", "version 2 is not known; this mlcbuild reads 1"),
        ("version: 1\n", "", "2:1", "the file lacks 'version'"),
        ("version: 1", "version: 1\nmore: 2", "3:1", "'more' is not known here"),
        ("hf://org/tiny@main", "hf://org/tiny@", "4:3", "source 'hf://org/tiny@': '' is not a branch, tag"),
        ("hf://org/tiny@main", "models/tiny", "4:3", "'models/tiny' is a directory; only hf:// sources"),
        (COMMIT, "main", "5:5", "a commit is 40 hex digits"),
        ("@main", f"@{'f' * 40}", "5:5", f"the source is at commit {'f' * 40}, but {COMMIT} is pinned"),
        (f'    commit: "{COMMIT}"\n', "", "4:3", "'hf://org/tiny@main' lacks 'commit'"),
        ("size: 3", "size: -3", "7:23", "a size is a number of bytes"),
        ("size: 3", "size: true", "7:23", "a size is a number of bytes"),
        ("size: 3, ", "", "7:7", "'config.json' lacks 'size'"),
        ("a" * 64, "a" * 63, "7:32", "a sha256 is 64 hex digits"),
        ('"config.json"', '"a/../config.json"', "6:5", "there is no config.json among the files"),
        ('"config.json"', '"a/../config.json"', "7:7", "the file name 'a/../config.json' is no plain path"),
        ('"model.safetensors"', '"config.json"', "8:7", "the key 'config.json' appears twice"),
        (TEXT.partition("sources:")[2], " []\n", "3:1", "'sources' must be a mapping"),
        ("version: 1", "<<<<<<< HEAD\nversion: 1", "3:8", ""),
    ],
)
def test_a_damaged_lock_says_where_and_what_to_do(
    tmp_path: Path, old: str, new: str, place: str, message: str
) -> None:
    path = tmp_path / lock.NAME
    assert old in TEXT
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        lock.read(path)
    lines = str(caught.value).splitlines()
    assert any(line.startswith(f"{path}:{place}: {message}") for line in lines), str(caught.value)
    advice = "; restore the file from version control, or delete it and run `mlcbuild lock`"
    assert all(line.endswith(advice) for line in lines)


def test_all_faults_of_a_lock_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / lock.NAME
    path.write_text(TEXT.replace("size: 3", "size: x").replace("b" * 64, "b").replace(COMMIT, "c"))
    with pytest.raises(InputError) as caught:
        lock.read(path)
    assert len(caught.value.problems) == 3


def test_a_missing_lock_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"recipe.lock: not found; run `mlcbuild lock` to pin"):
        lock.read(tmp_path / lock.NAME)


def test_a_lock_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"recipe.lock: cannot be written: No such file"):
        lock.write(tmp_path / "absent" / lock.NAME, LOCK)


def test_drift_from_the_recipe_names_every_source() -> None:
    path = Path(lock.NAME)
    lock.check([TINY], LOCK, path)
    lock.check([], LOCK, path)  # an entry too many is harmless
    other = HubSource("org/tiny", "v2")
    with pytest.raises(UsageError) as caught:
        lock.check([TINY, other, HubSource("new/model")], LOCK, path)
    assert str(caught.value).splitlines() == [
        "recipe.lock: hf://new/model@main is not pinned",
        "recipe.lock: hf://org/tiny@v2 is not pinned (it pins hf://org/tiny@main)",
        "the recipe has changed since it was locked: run `mlcbuild lock`",
    ]


def refusal(client: Client, function: str, *arguments: object) -> str:
    with pytest.raises(RefusedError) as caught:
        client.call(function, *arguments)
    assert caught.value.kind in ("SourceError", "UnreachableError", "AbsentError"), caught.value
    return caught.value.message


def resolved(client: Client, path: Path, *sources: str, keep: Path | None = None) -> Lock:
    path.write_text(str(client.call("lock", sources, str(keep) if keep else None)))
    return lock.read(path)


def test_a_branch_is_pinned_to_a_commit_and_every_needed_file_to_its_digest(
    hub: Hub, client: Client, tmp_path: Path
) -> None:
    commit = hub.add("org/model", FILES)
    actual = resolved(client, tmp_path / "a.lock", "hf://org/model")
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    assert actual.sources[HubSource("org/model")] == Locked(
        commit, {name: Pinned(len(FILES[name]), hashlib.sha256(FILES[name]).hexdigest()) for name in needed}
    )
    # The digest of a large file is the hub's word; only small files are downloaded.
    assert not hub.asked("GET", "org/model/resolve/" + commit + "/model.safetensors")
    same = resolved(client, tmp_path / "b.lock", f"hf://org/model@{commit}")
    assert same.sources[HubSource("org/model", commit)] == actual.sources[HubSource("org/model")]


def test_only_the_shards_of_the_index_are_pinned(hub: Hub, client: Client, tmp_path: Path) -> None:
    hub.add("org/shards", SHARDS)
    actual = resolved(client, tmp_path / "a.lock", "hf://org/shards")
    files = set(actual.sources[HubSource("org/shards")].files)
    assert files == set(SHARDS) - {"model-00003-of-00002.safetensors"}


def test_an_index_in_large_file_storage_is_pinned_by_its_sha256(
    hub: Hub, client: Client, tmp_path: Path
) -> None:
    commit = hub.add("org/large-index", SHARDS)
    repo = hub.repos["org/large-index"]
    repo.large_files.add(INDEX)
    repo.faults[INDEX] = Fault("wrong")
    message = refusal(client, "lock", ["hf://org/large-index"])
    size = len(SHARDS[INDEX])
    assert message.startswith(f"hf://org/large-index@{commit}: {INDEX}: the {size} bytes that were received")
    repo.faults.clear()
    actual = resolved(client, tmp_path / "a.lock", "hf://org/large-index")
    files = actual.sources[HubSource("org/large-index")].files
    assert files[INDEX] == Pinned(size, hashlib.sha256(SHARDS[INDEX]).hexdigest())
    assert set(files) == set(SHARDS) - {"model-00003-of-00002.safetensors"}


def test_an_index_that_is_too_large_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {INDEX: HubFile((64 << 20) + 1, "0" * 40, "0" * 64), "config.json": HubFile(2, "0" * 40, None)}
    monkeypatch.setattr("mlcbuild.checkpoints.hub.list_files", lambda source: ("c" * 40, files))
    with pytest.raises(SourceError, match=rf"org/m@c{{40}}: {INDEX}: the hub lists 67108865 bytes"):
        lock.resolve([HubSource("org/m")])


def test_all_parts_of_a_gguf_file_are_pinned(hub: Hub, client: Client, tmp_path: Path) -> None:
    parts = [f"q4/a-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.add("org/packed", {**FILES, "b.gguf": b"GGUF", **dict.fromkeys(parts, b"GGUF")})
    path = tmp_path / "a.lock"
    actual = resolved(client, path, f"hf://org/packed/{parts[0]}", "hf://org/packed")
    packed, plain = (HubSource("org/packed", "main", file) for file in (parts[0], ""))
    assert set(actual.sources[packed].files) == set(parts)
    assert "config.json" in actual.sources[plain].files
    path.write_text(path.read_text().replace(f'{parts[0]}": {{size', 'other.gguf": {size'))
    with pytest.raises(InputError, match=r"there is no q4/a-00001-of-00002.gguf among the files"):
        lock.read(path)
    message = refusal(client, "lock", ["hf://org/packed/c.gguf"])
    assert message.startswith("hf://org/packed/c.gguf@main: there is no file c.gguf; did you mean")


def test_an_adapter_is_pinned(hub: Hub, client: Client, tmp_path: Path) -> None:
    hub.add("org/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"})
    actual = resolved(client, tmp_path / "a.lock", "hf://org/adapter")
    assert len(actual.sources[HubSource("org/adapter")].files) == 2


def test_a_pin_is_kept_until_it_is_renewed(hub: Hub, client: Client, tmp_path: Path) -> None:
    old = hub.add("org/moves", FILES)
    path = tmp_path / lock.NAME
    resolved(client, path, "hf://org/moves")
    assert client.call("moved", str(path)) == {}
    new = hub.add("org/moves", FILES | {"config.json": b"{}"})
    assert client.call("moved", str(path)) == {"hf://org/moves@main": new}
    kept = resolved(client, tmp_path / "b.lock", "hf://org/moves", keep=path)
    assert kept.sources[HubSource("org/moves")].commit == old
    # What was pinned is still there, whatever the branch says now.
    params = kept.sources[HubSource("org/moves")].params(HubSource("org/moves"))
    client.call("fetch", params["repo"], params["commit"], params["files"], str(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").read_bytes() == FILES["config.json"]
    renewed = resolved(client, tmp_path / "c.lock", "hf://org/moves")
    assert renewed.sources[HubSource("org/moves")].commit == new


def test_a_hub_that_names_no_commit(hub: Hub, client: Client, tmp_path: Path) -> None:
    hub.add("org/moves", FILES)
    path = tmp_path / lock.NAME
    resolved(client, path, "hf://org/moves")
    hub.repos["org/moves"].faults[None] = Fault("no_commit", times=1)
    message = "hf://org/moves@main: the hub names no commit for this revision; is HF_ENDPOINT a hub?"
    assert refusal(client, "moved", str(path)) == message


def test_a_lock_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / lock.NAME
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(UsageError, match=r"recipe\.lock: cannot be written: File too large"):
            lock.write(path, lock.Lock({}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_pinned_commit_never_moves(hub: Hub, client: Client, tmp_path: Path) -> None:
    commit = hub.add("org/fixed", FILES)
    path = tmp_path / lock.NAME
    resolved(client, path, f"hf://org/fixed@{commit}")
    hub.add("org/fixed", FILES | {"config.json": b"{}"})
    assert client.call("moved", str(path)) == {}


def test_sources_no_longer_in_the_recipe_are_dropped(hub: Hub, client: Client, tmp_path: Path) -> None:
    hub.add("org/stays", FILES)
    hub.add("org/goes", FILES)
    path = tmp_path / lock.NAME
    resolved(client, path, "hf://org/stays", "hf://org/goes")
    kept = resolved(client, tmp_path / "b.lock", "hf://org/stays", keep=path)
    assert set(kept.sources) == {HubSource("org/stays")}


def test_every_source_that_cannot_be_pinned_is_reported(hub: Hub, client: Client) -> None:
    hub.add("org/pickled", {"config.json": b"{}", "model.pth": b""})
    hub.add("org/plain", FILES)
    hub.repos["org/secret"] = hub.repos["org/plain"].__class__(token="hf_x")
    lines = refusal(
        client,
        "lock",
        ["hf://org/absent", "hf://org/pickled", "hf://org/plain@v9", "hf://org/secret"],
    ).splitlines()
    assert lines == [
        f"hf://org/absent@main: {hub.address} has no such repository, or it is private; check the name, "
        "or set HF_TOKEN to a token that may read it",
        "hf://org/pickled@main: it has no weights that can be read; it has model.pth; weights must be "
        "*.safetensors or pytorch_model.bin",
        f"hf://org/plain@v9: there is no such revision; {hub.address}/org/plain/commits lists them",
        f"hf://org/secret@main: access is restricted; ask for it at {hub.address}/org/secret, "
        "then set HF_TOKEN to your token",
    ]


def test_a_small_file_that_is_not_what_the_hub_lists_is_refused(
    hub: Hub, client: Client, tmp_path: Path
) -> None:
    commit = hub.add("org/forged", FILES)
    hub.repos["org/forged"].faults["config.json"] = Fault("wrong")
    message = refusal(client, "lock", ["hf://org/forged"])
    assert message.startswith(
        f"hf://org/forged@{commit}: config.json: the 23 bytes that were received are not the 23"
    )
    hub.repos["org/forged"].faults["config.json"] = Fault("wrong", times=0)
    resolved(client, tmp_path / "a.lock", "hf://org/forged")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tokenizer\\..\\..\\x.json"], "the file name 'tokenizer\\\\..\\\\..\\\\x.json' is no plain path"),
        ([f"tokenizer{'x' * 300}.json"], "is longer than 255 bytes"),
        (["model.safetensors.index.json"], "model.safetensors.index.json is damaged"),
    ],
)
def test_an_unusable_listing_is_refused(hub: Hub, client: Client, names: list[str], message: str) -> None:
    repo = f"org/odd{len(names[0])}"
    files = {name: FILES[name] for name in ("config.json", "tokenizer.json")}
    hub.add(repo, files | {"weights.safetensors": b""} | dict.fromkeys(names, b"x"))
    actual = refusal(client, "lock", [f"hf://{repo}"])
    assert actual.startswith(f"hf://{repo}@main: ") and message in actual


def test_something_that_is_no_hub_is_refused(hub: Hub, client: Client) -> None:
    hub.add("org/portal", FILES)
    hub.repos["org/portal"].faults[None] = Fault("not_a_hub")
    message = refusal(client, "lock", ["hf://org/portal"])
    assert message == (
        f"hf://org/portal@main: {hub.address} does not answer like a hub; check HF_ENDPOINT and the proxy"
    )


def test_a_moved_check_that_cannot_ask_is_reported(tmp_path: Path) -> None:
    lock.write(tmp_path / lock.NAME, LOCK)
    with Client(tmp_path / "home", "http://127.0.0.1:9") as client:
        message = refusal(client, "moved", str(tmp_path / lock.NAME))
    assert message.startswith("hf://org/tiny@main: http://127.0.0.1:9 cannot be reached (Connection refused)")
