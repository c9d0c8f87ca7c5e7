"""Tests of the commands `mlcbuild init`, `validate` and `lock`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mlcbuild.installed import first_recipe
from mlcbuild.installed.default_scheme import choose_scheme, parameter_count
from mlcbuild.installed.resolve import machine_words
from tests.cli.commands import Out, said
from tests.conftest import QUICKSTART


@pytest.mark.skipif(os.getuid() == 0, reason="needs a user other than root, who may read everything")
def test_an_unreadable_recipe(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(QUICKSTART)
    path.chmod(0)
    assert said(capsys, 2, "validate", str(path)) == (
        "",
        f"{path}: cannot read this file: Permission denied\n",
    )


def test_a_model_must_be_pinned_before_it_is_used(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(QUICKSTART.replace("./tiny", "hf://a/b@main").replace("verify:", "#"))
    _, stderr = said(capsys, 2, "plan", str(path))
    assert stderr == f"{path}: hf://a/b@main must be pinned before it is used: run `mlcbuild lock {path}`\n"
    _, stderr = said(capsys, 2, "lock", "--check", str(path))
    assert "must be pinned before it is used" in stderr


def test_init_writes_a_recipe_that_works_once_a_model_is_there(
    tmp_path: Path, place: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stdout, _ = said(capsys, 0, "init", "new/deep")
    assert stdout == (
        "new/deep/recipe.yaml: put a checkpoint into new/deep/model, then run "
        "`mlcbuild run new/deep/recipe.yaml`\n"
    )
    _, stderr = said(capsys, 2, "validate", "new/deep/recipe.yaml")
    assert "there is no directory './model'" in stderr
    shutil.copytree(place / "tiny", "new/deep/model")
    stdout, _ = said(capsys, 0, "validate", "new/deep/recipe.yaml")
    scheme = choose_scheme(machine_words()).scheme
    assert stdout.splitlines() == [f"mine-{scheme}-host", "new/deep/recipe.yaml: 1 variant"]


def test_init_writes_a_recipe_for_a_model(
    tmp_path: Path, place: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, stderr = said(capsys, 2, "run")
    assert stderr == "there is no recipe.yaml here: name a recipe, or write one with `mlcbuild init`\n"
    shutil.copytree(place / "tiny", "my modèl")
    stdout, _ = said(capsys, 0, "init", "my modèl")
    assert stdout == "recipe.yaml: run `mlcbuild run recipe.yaml`\n"
    assert '"./my modèl"' in Path("recipe.yaml").read_text(encoding="utf-8")
    variant = f"my-mod-l-{choose_scheme(machine_words(), parameter_count('my modèl')).scheme}-host"
    for words in (["validate"], ["validate", "."]):
        assert said(capsys, 0, *words)[0].splitlines() == [variant, "recipe.yaml: 1 variant"]
    monkeypatch.chdir(tmp_path / "my modèl")
    assert "is the checkpoint itself: go to the directory above" in said(capsys, 2, "init", ".")[1]
    (tmp_path / "recipe.yaml").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_recipe, "parameter_count", lambda source: None)
    stdout, _ = said(capsys, 0, "init", "hf://org/model")
    assert stdout == "recipe.yaml: run `mlcbuild lock recipe.yaml`, then `mlcbuild run recipe.yaml`\n"
    assert 'model: "hf://org/model"' in Path("recipe.yaml").read_text()
    Path("recipe.yaml").unlink()
    assert said(capsys, 2, "init", "nowhere.gguf")[1] == "nowhere.gguf: there is no such file\n"


def test_validate_states_problems_as_facts(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("version: 1\nmodels: {a: ./nowhere}\nquantizations: [q4f61_1]\ntargets: [host]\n")
    stdout, stderr = said(capsys, 2, "validate", str(path), "--json")
    assert not stderr
    problems = json.loads(stdout)["problems"]
    assert [(item["file"], item["line"], item["column"]) for item in problems] == [
        (str(path), 2, 13),
        (str(path), 3, 17),
    ]
    stdout, stderr = said(capsys, 2, "validate", str(path))
    assert not stdout
    assert stderr.splitlines() == [
        f"{item['file']}:{item['line']}:{item['column']}: {item['message']}" for item in problems
    ]


def test_lock_of_local_sources_has_nothing_to_do(here: Path, capsys: Out) -> None:
    for command in (["lock", "recipe.yaml"], ["lock", "recipe.yaml", "--check"]):
        stdout, _ = said(capsys, 0, *command)
        assert stdout == "recipe.yaml: every source is local: there is nothing to lock\n"
    assert not (here / "recipe.lock").exists()
