"""Tests of the models that `chat` and `serve` keep: their description files, and when a model must be built
again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format import regular

from mlcbuild.errors import UsageError
from mlcbuild.installed import entries
from mlcbuild.installed.entries import InstalledModel


def install(root: Path, name: str, used: float = 0.0, **fields: Any) -> InstalledModel:
    """Writes the files of an installed model below `root`, with a bundle whose manifest is 5 bytes of text,
    and returns its description. used: Unix time in seconds that counts as the model's last use; fields:
    values of the description, such as its scheme."""
    directory = root / entries.DIRECTORY / name
    (directory / "bundle").mkdir(parents=True)
    (directory / "bundle" / entries.MANIFEST).write_text("12345")
    model = InstalledModel(directory, fields.pop("source", f"/models/{name}"), **fields)
    model.write()
    os.utime(directory / "installed.json", (used, used))
    return model


def test_what_is_written_is_read_the_last_used_first(tmp_path: Path) -> None:
    old = install(tmp_path, "old", 100.0, scheme="q8a8_1", target="x86-64-v3", choice="default")
    new = install(tmp_path, "new", 200.0)
    assert entries.read(tmp_path) == (new, old)
    assert old.is_default and not new.is_default
    assert (old.size, old.used) == (5, 100.0)
    old.note_use()
    assert entries.read(tmp_path) == (old, new)
    assert entries.read(tmp_path / "elsewhere") == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        json.dumps({"format": "mlcbuild-installed/0", "source": "s", "files": {}}),
        json.dumps({"format": entries.FORMAT, "source": "s"}),
        json.dumps({"format": entries.FORMAT, "source": 1, "files": {}}),
        json.dumps({"format": entries.FORMAT, "source": "s", "files": {"a": [1]}}),
        json.dumps({"format": entries.FORMAT, "source": "s", "files": {}, "other": "x"}),
        json.dumps({"format": entries.FORMAT, "source": "s" * (5 << 20), "files": {}}),
        f'{{"format": "{entries.FORMAT}", "source": "s", "files": {{"a": [1e999, 1]}}}}',
    ],
    ids=range(11),
)
def test_a_damaged_description_is_left_out(tmp_path: Path, text: str) -> None:
    good = install(tmp_path, "good")
    install(tmp_path, "bad").directory.joinpath("installed.json").write_text(text)
    assert entries.read(tmp_path) == (good,)


def test_what_is_no_file_is_left_out_and_links_are_not_followed(tmp_path: Path) -> None:
    good, piped = install(tmp_path, "good"), install(tmp_path, "pipe")
    (piped.directory / "installed.json").unlink()
    os.mkfifo(piped.directory / "installed.json")
    assert entries.read(tmp_path) == (good,)
    (good.bundle / "elsewhere").symlink_to("/")
    (good.bundle / "lost").symlink_to("nowhere")
    assert 5 < good.size < 100
    (tmp_path / "linked" / "bundle").parent.mkdir()
    (tmp_path / "linked" / "bundle").symlink_to("/")
    assert InstalledModel(tmp_path / "linked", "s").size == 0


def test_an_edited_source_makes_a_bundle_stale(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    stat = (source / "config.json").stat()
    files = {"config.json": (stat.st_size, stat.st_mtime_ns)}
    installed = install(tmp_path, "m")
    model = InstalledModel(installed.directory, str(source), files=files)
    model.write()
    (again,) = entries.read(tmp_path)
    assert again == model and again.is_complete
    os.utime(source / "config.json", (1, 1))
    assert not again.is_complete
    (source / "config.json").unlink()
    assert not again.is_complete
    source.rmdir()
    assert again.is_complete, "without the checkpoint its bundle remains"
    (installed.bundle / entries.MANIFEST).unlink()
    assert not installed.is_complete, "an address has no files, but its bundle must be there"


def test_models_are_named_by_name_or_source(tmp_path: Path) -> None:
    model = install(tmp_path, "tiny", source="hf://owner/tiny")
    there = entries.read(tmp_path)
    assert entries.named(there, "tiny") == entries.named(there, "hf://owner/tiny") == model
    with pytest.raises(UsageError, match=r"^'tini' is not installed; .*tiny.*: mlcbuild list shows what is$"):
        entries.named(there, "tini")
    with pytest.raises(UsageError, match=r"^'tiny' is not installed: mlcbuild list shows what is$"):
        entries.named((), "tiny")


def test_a_name_starts_and_ends_with_a_letter_or_digit() -> None:
    assert entries.slug("/models/mein modell é/") == "mein-modell"
    assert entries.slug("hf://org/.hidden@main") == "hidden" and entries.slug("/é") == "model"


def test_a_model_that_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, gone = install(tmp_path, "kept"), install(tmp_path, "gone")
    read = regular.read

    def removed(path: Path, most: int) -> bytes:
        text = read(path, most)
        if path.parent == gone.directory:
            entries.remove(gone)
        return text

    monkeypatch.setattr(regular, "read", removed)
    assert entries.read(tmp_path) == (kept,)


def test_a_gguf_file_has_the_other_parts_of_a_split_one(tmp_path: Path) -> None:
    names = ["a.gguf", "ab.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "b-00001-of-00003.gguf"]
    for size, name in enumerate(names):
        (tmp_path / name).write_bytes(b"x" * size)
    assert list(entries.stats(tmp_path / "a.gguf")) == ["a.gguf"]
    parts = entries.stats(tmp_path / "b-00001-of-00002.gguf")
    assert {name: size for name, (size, _) in parts.items()} == {names[2]: 2, names[3]: 3}
    assert entries.stats(tmp_path / "none.gguf") == {}
