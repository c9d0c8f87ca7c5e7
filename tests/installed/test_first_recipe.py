"""Tests of the first recipe for a model: where it is written, and that it can be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlcbuild import recipe
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.errors import UsageError
from mlcbuild.installed import first_recipe
from mlcbuild.installed.default_scheme import choose_scheme
from mlcbuild.installed.entries import InstallOptions
from mlcbuild.installed.first_recipe import write
from mlcbuild.installed.resolve import bundles
from tests.conftest import TINY

WORDS = "x86_64-unknown-linux-gnu x86-64-v3"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates an empty directory, makes it the current one and returns it. The function that identifies this
    machine's processor is replaced, so that it returns an x86-64-v3 machine everywhere."""
    monkeypatch.setattr(first_recipe, "machine_words", lambda: WORDS)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def model_of(path: Path) -> tuple[str, object]:
    """Returns (name, source) of the only model of a recipe, which must be valid."""
    ((name, model),) = recipe.load(path, None, allow_outside=True).models.items()
    return name, getattr(model.source, "path", model.source)


def test_a_new_project_waits_for_its_checkpoint(here: Path) -> None:
    first = write("mine/sub")
    assert (first.path, first.checkpoint) == (Path("mine/sub/recipe.yaml"), Path("mine/sub/model"))
    assert first.commands == ("mlcbuild run mine/sub/recipe.yaml",)
    (here / "mine" / "sub" / "model").mkdir()
    assert model_of(first.path) == ("mine", here / "mine" / "sub" / "model")


def test_a_checkpoint_below_is_named_relative_to_the_recipe(here: Path) -> None:
    shutil.copytree(TINY, here / "models" / "tiny")
    for model in ("models/tiny", "./models//tiny/"):
        first = write(model)
        assert (first.path, first.checkpoint) == (Path("recipe.yaml"), None)
        assert first.commands == ("mlcbuild run recipe.yaml",)
        assert model_of(first.path) == ("tiny", here / "models" / "tiny")
        assert '{tiny: "./models/tiny"}' in first.path.read_text().replace("\n  ", " {").replace(
            '"  ', '"}  '
        )
        first.path.unlink()


def test_a_checkpoint_elsewhere_needs_an_option(here: Path) -> None:
    shutil.copytree(TINY, here.parent / "tiny")
    (here / "a").mkdir()
    for model in ("../tiny", "./../tiny", "a/../../tiny", str(here.parent / "tiny")):
        first = write(model)
        assert first.commands == ("mlcbuild run recipe.yaml --allow-outside",)
        name, path = model_of(first.path)
        assert name == "tiny" and Path(str(path)).resolve() == here.parent / "tiny"
        first.path.unlink()


@pytest.mark.parametrize("count", [1000, None])
def test_a_model_of_a_hub_is_locked_first(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    monkeypatch.setattr(first_recipe, "parameter_count", lambda source: count)
    first = write("hf://org/Model-1B@main")
    text = first.path.read_text()
    assert f"quantizations: [{choose_scheme(WORDS, count).scheme}] " in text, "as `chat` chooses"
    assert ("the model's size could not be read from the hub" in text) == (count is None)
    assert first.commands == ("mlcbuild lock recipe.yaml", "mlcbuild run recipe.yaml")
    assert model_of(first.path) == ("Model-1B", HubSource("org/Model-1B", "main"))


def test_the_scheme_suits_the_model_and_the_machine(here: Path) -> None:
    shutil.copytree(TINY, here / "tiny")
    choices = choose_scheme(WORDS, 1000), choose_scheme(WORDS)
    assert choices[0].scheme != choices[1].scheme
    for model, choice in zip(("tiny", "new"), choices, strict=True):
        text = write(model).path.read_text()
        assert f"quantizations: [{choice.scheme}]    # {choice.reason}; `mlcbuild schemes` lists all" in text


def test_what_cannot_be_written_is_refused(here: Path) -> None:
    (here / "a.gguf").touch()
    (here / "recipe.yaml").write_text("mine")
    with pytest.raises(UsageError, match=r"^recipe\.yaml: it exists already; it was not changed$"):
        write("a.gguf")
    assert (here / "recipe.yaml").read_text() == "mine"
    with pytest.raises(UsageError, match=r"^a\.gguf/x/recipe\.yaml: cannot be written: Not a directory$"):
        write("a.gguf/x")


def test_models_that_are_missing_or_this_directory(here: Path) -> None:
    with pytest.raises(UsageError, match=r"^b\.gguf: there is no such file$"):
        write("b.gguf")
    (here / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="is the checkpoint itself: go to the directory above"):
        write(".")
    assert not (here / "recipe.yaml").exists()


@pytest.mark.parametrize(
    "model", ["https://huggingface.co/org/model", "oci://host/name:tag", "s3://a/m.gguf"]
)
def test_other_addresses_are_no_directories(model: str, here: Path) -> None:
    with pytest.raises(UsageError, match="a recipe's model is a directory, a GGUF file, or hf://"):
        write(model)
    assert not [*here.iterdir()]


def test_a_malformed_address_is_refused(here: Path) -> None:
    with pytest.raises(UsageError, match="'org/a/b' is not the name of a repository; write hf://"):
        write("hf://org/a/b")
    assert not [*here.iterdir()]


def test_a_path_that_is_not_utf8_is_refused(here: Path) -> None:
    try:
        shutil.copytree(TINY, here / "bad\udcff")
    except OSError:
        pytest.skip("names on this file system are UTF-8, as on macOS")
    with pytest.raises(
        UsageError, match=r"bad\udcff: the path is not UTF-8, as a recipe must be: rename it$"
    ):
        write("bad\udcff")
    assert not (here / "recipe.yaml").exists()
    with pytest.raises(UsageError, match="the path is not UTF-8"):
        bundles("bad\udcff", InstallOptions(here / "store"))
