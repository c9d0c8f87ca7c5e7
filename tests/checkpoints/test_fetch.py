"""Tests of fetching checkpoints from a hub: which files are selected, how they are downloaded and verified,
and how fetching fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild.checkpoints.checkpoint_kinds import POOLING
from mlcbuild.checkpoints.fetch import INDEX, gguf_parts, index_of, index_shards, local_files, needed_files
from mlcbuild.checkpoints.hub import HubSource, check_name, parse_source
from mlcbuild.errors import SourceError, UsageError
from tests.checkpoints.hub_files import FETCHED, FILES, pins, refusal
from tests.hub import Fault, Hub
from tests.hub_client import Client

OUTSIDE = st.text("ab./\\:\n\x7f", min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf://Qwen/Qwen3-0.6B@c1899de289a04d12100db370d81485cdf75e47ca", None),
        ("hf://org/name", HubSource("org/name", "main")),
        ("hf://gpt2@v1.0", HubSource("gpt2", "v1.0")),
        ("hf://org/name@refs/pr/7", HubSource("org/name", "refs/pr/7")),
        (f"hf://{'o' * 42}/{'n' * 96}", HubSource(f"{'o' * 42}/{'n' * 96}")),
        ("hf://_org/_name_", HubSource("_org/_name_")),
        ("hf://org/name.gguf", HubSource("org/name.gguf")),
        ("hf://org/name/a.gguf", HubSource("org/name", "main", "a.gguf")),
        ("hf://org/name/q4 k/a.gguf@v1", HubSource("org/name", "v1", "q4 k/a.gguf")),
    ],
)
def test_a_hub_source_is_parsed_and_written_back(text: str, source: HubSource | None) -> None:
    actual = parse_source(text)
    assert actual is not None and (source is None or actual == source)
    assert parse_source(str(actual)) == actual
    assert actual.is_pinned == ("c1899de2" in text)


@pytest.mark.parametrize("text", ["./models/tiny", "/data/models", "tiny", "a@b"])
def test_anything_without_a_scheme_is_a_directory(text: str) -> None:
    assert parse_source(text) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("https://huggingface.co/org/name", "the scheme 'https' is unknown; write hf://"),
        ("hf://", "'' is not the name of a repository"),
        ("hf://a/b/c", "'a/b/c' is not the name of a repository"),
        ("hf://org/../x", "is not the name of a repository"),
        ("hf://org/na--me", "is not the name of a repository"),
        ("hf://org/name.git", "'org/name.git' is not the name of a repository"),
        (f"hf://org/{'n' * 97}", "is not the name of a repository"),
        ("hf://org/name/../a.gguf", "the file name '../a.gguf' is no plain path inside the repository"),
        ("hf://o--g/name/a.gguf", "'o--g/name' is not the name of a repository"),
        ("hf://org/name@", "'' is not a branch, tag or commit"),
        ("hf://org/name@../x", "'../x' is not a branch, tag or commit"),
        ("hf://org/name@a b", "'a b' is not a branch, tag or commit"),
    ],
)
def test_a_malformed_source_is_refused(text: str, fault: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source(text)
    assert str(caught.value).startswith(f"source '{text}': ")
    assert fault in str(caught.value)


def test_only_what_steps_read_is_needed() -> None:
    names = [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("tokenizer.model", "special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt"),
        *("model.safetensors", "1_Pooling/config.json"),
    ]
    others = [
        *("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "consolidated.safetensors", "README.md"),
        *(".gitattributes", "original/tokenizer.model", "model.fp16.safetensors", "training_args.json"),
    ]
    assert needed_files([*others, *names]) == tuple(sorted(names))


def test_of_shards_only_those_the_index_names_are_needed() -> None:
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    names = ["config.json", INDEX, *shards, "model-00003-of-00002.safetensors", "consolidated.00.safetensors"]
    assert needed_files(names, shards) == tuple(sorted(["config.json", INDEX, *shards]))
    # A single file wins over an index, as it does in transformers.
    assert needed_files([*names, "model.safetensors"], shards) == ("config.json", "model.safetensors")


def test_a_gguf_file_is_fetched_with_its_other_parts() -> None:
    names = ["x/a-00001-of-00002.gguf", "x/a-00002-of-00002.gguf", "a.gguf", "b-00001-of-00002.gguf"]
    assert gguf_parts(names, "a.gguf") == ("a.gguf",)
    assert gguf_parts(names, names[1]) == (names[0], names[1])
    for file, fault in (
        ("b-00001-of-00002.gguf", "there is no file b-00002-of-00002.gguf; did you mean 'b-00001-of-00002"),
        ("c.gguf", "there is no file c.gguf; did you mean 'a.gguf'?"),
    ):
        with pytest.raises(SourceError) as caught:
            gguf_parts(names, file)
        assert str(caught.value).startswith(fault)
    with pytest.raises(SourceError, match=r"there is no file a.gguf; it has no GGUF files"):
        gguf_parts(["config.json"], "a.gguf")


def test_weights_of_another_name_are_taken_where_there_is_no_index() -> None:
    names = ["config.json", "weights.safetensors", "adapter_model.safetensors"]
    assert needed_files(names) == ("config.json", "weights.safetensors")


@pytest.mark.parametrize(
    ("names", "shards", "fault"),
    [
        (["model.safetensors"], (), "it has no config.json"),
        (["b.gguf", "a.gguf"], (), "to build a.gguf, name that file"),
        (["config.json"], (), "it has no weights that can be read; weights must be"),
        (
            ["config.json", "a.gguf", "b.bin"],
            (),
            "it has no weights that can be read; it has a.gguf, b.bin; w",
        ),
        (["config.json", "consolidated.safetensors"], (), "it has no weights that can be read"),
        (
            ["config.json", "pytorch_model.bin.index.json"],
            ("x.bin",),
            "pytorch_model.bin.index.json names files that are not there: x.bin",
        ),
        (
            ["config.json", INDEX],
            ("x.safetensors",),
            f"{INDEX} names files that are not there: x.safetensors",
        ),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_refused(
    names: list[str], shards: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(SourceError) as caught:
        needed_files(names, shards)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"{", "is damaged"),
        (b"[]", "is damaged"),
        (b'{"weight_map": [1]}', "is damaged"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "is damaged"),
        (b'{"weight_map": {"a": []}}', "is damaged"),
        (b'{"weight_map": {"a": 7}}', "names 7, which is no safetensors file beside it"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "names '../x.safetensors'"),
        (b'{"weight_map": {"a": "x.bin"}}', "names 'x.bin'"),
    ],
)
def test_a_damaged_index_is_refused(data: bytes, fault: str) -> None:
    with pytest.raises(SourceError) as caught:
        index_shards(data, INDEX)
    assert fault in str(caught.value)


def test_the_index_of_the_files_of_pytorch_lists_such_files() -> None:
    index = "pytorch_model.bin.index.json"
    assert index_shards(b'{"weight_map": {"a": "x.bin"}}', index) == {"x.bin"}
    with pytest.raises(SourceError, match=r"names 'x.safetensors', which is no bin file beside it"):
        index_shards(b'{"weight_map": {"a": "x.safetensors"}}', index)
    names = ["config.json", index, "x.bin", "y.bin"]
    assert index_of(names) == index
    assert index_of([*names, "pytorch_model.bin"]) is None
    assert index_of([*names, "z.safetensors"]) is None
    assert needed_files(names, ["x.bin"]) == ("config.json", index, "x.bin")


def test_a_local_directory_is_selected_from_in_the_same_way(tmp_path: Path) -> None:
    for name in ("config.json", "a.safetensors", "b.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / INDEX).write_text('{"weight_map": {"w": "a.safetensors"}}')
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "notes.txt")
    assert local_files(tmp_path) == ("a.safetensors", "config.json", INDEX, "tokenizer.json")
    (tmp_path / "1_Pooling").mkdir()
    assert POOLING not in local_files(tmp_path)
    (tmp_path / POOLING).write_text("{}")
    assert local_files(tmp_path)[0] == POOLING


def test_an_unusable_local_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="absent: no such directory"):
        local_files(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="file: not a directory"):
        local_files(tmp_path / "file")
    with pytest.raises(SourceError, match=f"{tmp_path.name}: it has no config.json"):
        local_files(tmp_path)


@given(OUTSIDE)
def test_an_accepted_name_stays_inside(name: str) -> None:
    try:
        check_name(name)
    except SourceError:
        return
    inside = os.path.normpath(os.path.join("/base", name))  # noqa: PTH118 - what an attacker's join would do
    assert inside == f"/base/{name}" and "\\" not in name and name.isprintable()


def test_a_name_too_long_for_a_disk_is_refused(client: Client, tmp_path: Path) -> None:
    entry = {f"tokenizer{'x' * 300}.json": {"size": 1, "sha256": "0" * 64}}
    message = refusal(client, "fetch", "org/long", "0" * 40, entry, str(tmp_path / "out"))
    assert "...' is longer than 255 bytes; it cannot be written" in message


def test_a_path_too_long_for_a_disk_is_refused(hub: Hub, client: Client, tmp_path: Path) -> None:
    commit = hub.add("org/deep", FILES)
    deep = tmp_path.joinpath(*["d" * 200] * 30)
    message = refusal(client, "fetch", "org/deep", commit, pins("config.json"), str(deep))
    assert message.startswith(f"hf://org/deep@{commit}: config.json: the path is too long to write")


def test_offline_uses_the_cache_and_names_all_that_is_missing(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/offline", FILES)
    with Client(tmp_path / "home", hub.address) as online:
        online.call("fetch", "org/offline", commit, pins("config.json"), str(tmp_path / "one"))
    with Client(tmp_path / "home", "http://127.0.0.1:9", HF_HUB_OFFLINE="1") as offline:
        offline.call("fetch", "org/offline", commit, pins("config.json"), str(tmp_path / "two"))
        message = refusal(offline, "fetch", "org/offline", commit, pins(), str(tmp_path / "three"))
        assert "HF_HUB_OFFLINE is set, and the cache" in message
        assert "lacks model.safetensors, tokenizer.json, tokenizer.model; unset it" in message
        # A damaged copy cannot be replaced offline: it is named.
        cached = next((tmp_path / "home").rglob("blobs/*"))
        cached.write_bytes(b"x" * len(FILES["config.json"]))
        message = refusal(
            offline, "fetch", "org/offline", commit, pins("config.json"), str(tmp_path / "four")
        )
        assert "config.json: its sha256 is" in message
        message = refusal(offline, "lock", ["hf://org/offline"])
        assert message == (
            "hf://org/offline@main: the hub must be queried, but HF_HUB_OFFLINE is set; unset it"
        )


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached (Connection refused)"),
        ("http://hub.invalid", "http://hub.invalid cannot be reached ("),
        ("nonsense", "HF_ENDPOINT is 'nonsense', which is no address; write https://host"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path, endpoint: str, message: str) -> None:
    with Client(tmp_path / "home", endpoint) as client:
        actual = refusal(client, "fetch", "org/name", "0" * 40, pins("config.json"), str(tmp_path / "out"))
    assert actual.startswith(f"hf://org/name@{'0' * 40}: config.json: {message}")


def test_a_hub_that_does_not_answer_in_time_is_named(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/slow", FILES)
    hub.repos["org/slow"].faults["config.json"] = Fault("slow")
    with Client(tmp_path / "home", hub.address, HF_HUB_ETAG_TIMEOUT="1") as client:
        message = refusal(client, "fetch", "org/slow", commit, pins("config.json"), str(tmp_path / "out"))
    assert f"{hub.address} does not answer in time; try again, or raise HF_HUB_ETAG_TIMEOUT" in message


def test_a_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/home", FILES)
    (tmp_path / "home").write_text("a file where a directory should be")
    with Client(tmp_path / "home", hub.address) as client:
        message = refusal(client, "fetch", "org/home", commit, pins("config.json"), str(tmp_path / "out"))
    assert "Not a directory; check it, or set HF_HOME to a directory you can write" in message


def test_a_killed_download_is_completed_by_the_next(tmp_path: Path) -> None:
    with Hub() as hub:
        commit = hub.add("org/killed", FILES)
        hub.repos["org/killed"].faults["model.safetensors"] = Fault("hold", times=1)
        first = Client(tmp_path / "home", hub.address)
        first.start("fetch", "org/killed", commit, pins(), str(tmp_path / "one"))
        assert hub.held.wait(120)
        first.kill()
        assert not (tmp_path / "one" / "model.safetensors").exists()
        hub.release.set()
        with Client(tmp_path / "home", hub.address) as second:
            assert second.call("fetch", "org/killed", commit, pins(), str(tmp_path / "two")) == FETCHED
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_importing_the_module_does_not_load_huggingface_hub(client: Client, tmp_path: Path) -> None:
    with Client(tmp_path / "home", "http://127.0.0.1:9") as fresh:
        assert fresh.call("imported") is False
