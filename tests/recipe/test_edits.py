"""Tests of small edits of a recipe and its files: exactly those steps run again that depend on the edit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild import pipeline, recipe
from mlcbuild.build.plan import plan
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.store.store import Store
from tests.conftest import ROOT, checked, fill, project

pytestmark = pytest.mark.xdist_group("edits")  # one process builds what is edited
RECIPE = """\
version: 1
name: edits
vars: {batch: 3}
models: {tiny: ./tiny}
quantizations: [q4f16_1]
targets: [host]
compile: {context_window: 128, prefill_chunk: 64, max_batch: "${batch}"}
verify: {prompts: prompts.txt, max_kl: 0.5}
"""
NOTHING: frozenset[str] = frozenset()
LIBRARY = frozenset({"library", "bundle", "verify"})
NAMES = frozenset({"bundle", "verify"})
"""Kinds of steps whose results contain names that users see, such as the name of a model."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with a recipe and a store in which the recipe was run once. The steps' real actions
    were replaced by ones that write a few bytes."""
    home = tmp_path_factory.mktemp("edits")
    path = project(home / "project", RECIPE)
    shutil.copy(ROOT / "recipes" / "prompts" / "tiny.txt", path.parent / "prompts.txt")
    checked(fill(path, store=home / "store"))
    return home


def text(old: str, new: str) -> Callable[[Path], None]:
    def edit(home: Path) -> None:
        path = home / "recipe.yaml"
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new))

    return edit


def document(name: str, key: str, value: object) -> Callable[[Path], None]:
    """Returns a function that edits the checkpoint of a recipe in a given directory: it sets the field `key`
    in the JSON file `name` to `value`."""

    def edit(home: Path) -> None:
        path = home / "tiny" / name
        actual = json.loads(path.read_bytes())
        path.write_text(json.dumps({**actual, key: value}, indent=2))

    return edit


def more(name: str, data: bytes) -> Callable[[Path], None]:
    def edit(home: Path) -> None:
        with (home / name).open("ab") as file:
            file.write(data)

    return edit


def reordered(home: Path) -> None:
    path = home / "recipe.yaml"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(first + "".join(reversed(rest)))


def touched(home: Path) -> None:
    os.utime(home / "tiny" / "model.safetensors")


def one_bit(home: Path) -> None:
    path = home / "tiny" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def moved(home: Path) -> None:
    (home / "tiny").rename(home / "elsewhere")
    text("./tiny", "./elsewhere")(home)


EDITS: dict[str, tuple[Callable[[Path], None], frozenset[str]]] = {
    "a comment": (text("name: edits", "name: edits  # of ours"), NOTHING),
    "empty lines": (text("models:", "\n\nmodels:"), NOTHING),
    "another order of sections": (reordered, NOTHING),
    "block style": (text("quantizations: [q4f16_1]", "quantizations:\n  - q4f16_1"), NOTHING),
    "another name of the recipe": (text("name: edits", "name: others"), NOTHING),
    "a value in place of a variable": (
        lambda home: (text("vars: {batch: 3}\n", "")(home), text('"${batch}"', "3")(home))[0],
        NOTHING,
    ),
    "another output": (text("verify:", 'bundle: {output: "out/{model}"}\nverify:'), NOTHING),
    "a shared cache": (text("verify:", 'cache: {remotes: [{url: "file:///cache"}]}\nverify:'), NOTHING),
    "a file more beside the weights": (more("tiny/README.md", b"# tiny\n"), NOTHING),
    "a file more beside the recipe": (more("notes.txt", b"x"), NOTHING),
    "a new time of the weights": (touched, NOTHING),
    "another directory": (moved, NOTHING),
    "another name of the model": (text("{tiny: ./tiny}", "{small: ./tiny}"), NAMES),
    "another name of the scheme": (text("[q4f16_1]", "{small: q4f16_1}"), NAMES),
    "a larger batch": (text("batch: 3", "batch: 4"), LIBRARY),
    # The prompts are scored in windows of the context.
    "a longer context": (text("context_window: 128", "context_window: 144"), LIBRARY | {"reference"}),
    "another scheme": (text("[q4f16_1]", "[q8f16_1]"), LIBRARY | {"weights"}),
    "other bits for some tensors": (
        text("[q4f16_1]", "{q4: {scheme: q4f16_1, overrides: [{match: embed, scheme: q8f16_1}]}}"),
        LIBRARY | {"weights"},
    ),
    "another limit of loss": (text("max_kl: 0.5", "max_kl: 0.6"), frozenset({"verify"})),
    "another prompt": (more("prompts.txt", b"copy abc\n"), frozenset({"reference", "verify"})),
    "one bit of the weights": (one_bit, NAMES | {"weights", "reference"}),
    "another end of texts": (
        document("tokenizer_config.json", "clean_up_tokenization_spaces", True),
        NAMES | {"tokenizer", "reference"},
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_runs_what_depends_on_it(name: str, done: Path, tmp_path: Path) -> None:
    edit, expected = EDITS[name]
    home = shutil.copytree(done / "project", tmp_path / "project", ignore=shutil.ignore_patterns("dist"))
    edit(home)
    created = pipeline.build(recipe.load(home / "recipe.yaml"), Lock())
    actual = plan(created.graph, Store(done / "store"))
    assert {step.name.partition("/")[0] for step in actual.steps if step.state != "hit"} == expected


def test_an_edit_without_effect_stops_where_that_shows(done: Path, tmp_path: Path) -> None:
    home = shutil.copytree(done / "project", tmp_path / "project", ignore=shutil.ignore_patterns("dist"))
    document("config.json", "_name_or_path", "somewhere else")(home)
    said = json.loads(checked(fill(home / "recipe.yaml", "--json", store=done / "store")))
    built = {step["name"].partition("/")[0] for step in said["steps"] if step["status"] == "built"}
    assert built == {"config", "tokenizer"}
