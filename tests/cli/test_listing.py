"""Tests of the commands that list families, schemes, targets and schemas, and of `mlcbuild doctor`."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from mlcbuild.documents.schema import schema
from mlcbuild.models.parsing import family_names
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.targets.presets import presets
from tests.cli.commands import Out, said
from tests.conftest import mlcbuild


@pytest.mark.parametrize(
    ("verb", "names"),
    [("targets", {*presets(), "host"}), ("models", set(family_names())), ("schemes", set(SCHEMES))],
)
def test_lists_hold_all_there_is(capsys: Out, verb: str, names: set[str]) -> None:
    heads = [line.split()[0] for line in said(capsys, 0, verb)[0].splitlines()]
    assert set(heads[1:]) == names
    assert set(json.loads(said(capsys, 0, verb, "--json")[0])) == names


def test_schemas_are_the_published_ones(capsys: Out) -> None:
    assert json.loads(said(capsys, 0, "schema")[0]) == schema("recipe")
    assert json.loads(said(capsys, 0, "schema", "target")[0]) == schema("target")


def test_doctor_finds_this_machine_fit(here: Path, capsys: Out) -> None:
    rows = [line.split(maxsplit=1) for line in said(capsys, 0, "doctor")[0].splitlines()]
    assert {state for state, _ in rows} == {"ok"}
    assert [text.split("  ")[0] for _, text in rows] == [
        "python",
        "machine",
        "host target",
        "compiler",
        "linker",
        "presets",
        "store",
    ]
    assert not Path(os.environ["MLCBUILD_STORE"]).exists(), "looking changes nothing"


@pytest.mark.skipif(find_spec("ziglang") is not None, reason="ziglang links without a linker on the path")
def test_a_machine_without_a_linker(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = mlcbuild("doctor", store=tmp_path / "store")
    assert result.returncode == 3
    assert "FAIL  linker       no linker for " in result.stdout
    assert "presets      can build for webgpu; not for aarch64-linux, " in result.stdout
    result = mlcbuild(
        "run", "recipe.yaml", "--only", "library/*/q0f32/host", store=tmp_path / "store", cwd=place
    )
    assert result.returncode == 3
    assert result.stderr.startswith("no linker for ")
    assert "Traceback" not in result.stdout + result.stderr
