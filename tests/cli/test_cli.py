"""Tests of the command line as users see it: help texts, wrong usage, exit codes, JSON output, signals, and
unusual output streams."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from mlcbuild_format.errors import BundleError, SetupError

from mlcbuild import cli
from mlcbuild.cli import VERBS, main, parser
from mlcbuild.errors import StepError, UsageError
from tests.cli.commands import BUNDLE, Out, said
from tests.conftest import QUICKSTART, ROOT, checked, mlcbuild, project


@pytest.mark.parametrize("name", VERBS)
def test_help_shows_an_example_that_parses(capsys: Out, name: str) -> None:
    verb = VERBS[name]
    stdout, stderr = said(capsys, 0, name, "--help")
    assert f"example: {verb.example}" in " ".join(stdout.split())
    assert not stderr
    program, *words = shlex.split(verb.example.partition(">")[0])
    assert (program, words[0]) == ("mlcbuild", name)
    assert parser().parse_args(words).verb == name


@pytest.mark.parametrize("name", VERBS)
def test_every_argument_is_explained(name: str) -> None:
    alone = argparse.ArgumentParser()
    for configure in VERBS[name].configure:
        configure(alone)
    assert all(action.help for action in alone._actions)


def test_the_top_lists_all_verbs(capsys: Out) -> None:
    stdout, _ = said(capsys, 0, "--help")
    for name, verb in VERBS.items():
        assert re.search(rf"^    {name}\s+{re.escape(verb.help)}$", stdout, re.MULTILINE)
    assert said(capsys, 0, "--version")[0].startswith("mlcbuild 0.")
    assert said(capsys, 2) == ("", stdout), "without a verb, help goes to stderr"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--nope", "mlcbuild: '--nope' stands before the verb: write mlcbuild VERB [OPTIONS]"),
        ("--json plan recipe.yaml", "mlcbuild: '--json' stands before the verb"),
        ("rnu recipe.yaml", "mlcbuild: 'rnu' is not a verb; did you mean 'run'?"),
        ("make", "mlcbuild: 'make' is not a verb; known: bench, cache, chat, completion, doctor, "),
        (
            "publish .",
            "mlcbuild publish: the destination is missing: mlcbuild publish BUNDLE --to oci://host/name:tag",
        ),
        ("explain", "mlcbuild explain: error: the following arguments are required: step"),
        ("run recipe.yaml other.yaml", "mlcbuild run: 'other.yaml' is one argument too many; see"),
        ("run recipe.yaml --jobs 0", "--jobs: must be a whole number of at least 1, found '0'"),
        ("run recipe.yaml --jobs x", "--jobs: must be a whole number of at least 1, found 'x'"),
        ("run recipe.yaml --job=2", "mlcbuild run: '--job' is not an option; did you mean '--jobs'?"),
        ("run recipe.yaml --keep", "mlcbuild run: '--keep' is not an option; did you mean '--keep-going'?"),
        ("run recipe.yaml --executor dask", "'dask' must be processes, inline, or dask://HOST:PORT"),
        ("run recipe.yaml --set batch", "mlcbuild: --set batch: write --set name=value"),
        ("run recipe.yaml --set batch=1", "recipe.yaml:1:1: --set batch=1: this recipe has no variable"),
        ("run recipe.yaml --only nope", "no step is called 'nope'; known: bundle/tiny-q0f32-host, "),
        ("run recipe.yaml --force weights/tiny/q0f32/plan", "did you mean 'weights/tiny/q0f32/plain'?"),
        ("explain recipe.yaml config/tiyn", "did you mean 'config/tiny'?"),
        ("graph recipe.yaml --format png", "--format: invalid choice: 'png'"),
        ("graph recipe.yaml -o nowhere/graph.svg", "nowhere/graph.svg: cannot be written: No such file"),
        ("cache clean", "argument action: invalid choice: 'clean'"),
        ("schema recipes", "argument kind: invalid choice: 'recipes'"),
        ("serve b --port x", "--port: invalid int value: 'x'"),
        ("chat b --threads 0", "--threads: must be a whole number of at least 1, found '0'"),
        ("plan nope.yaml", "nope.yaml: cannot read this file: No such file or directory"),
        ("validate tiny", "tiny: there is no recipe.yaml in this directory: name a recipe, or write"),
        ("lock nope.yaml", "nope.yaml: cannot read this file: No such file or directory"),
        ("init", "recipe.yaml: it exists already; it was not changed"),
        ("init recipe.yaml", "recipe.yaml/recipe.yaml: cannot be written: "),
        ("init nowhere.gguf", "recipe.yaml: it exists already; it was not changed"),
    ],
)
def test_wrong_usage_is_one_sentence_and_code_2(here: Path, capsys: Out, command: str, sentence: str) -> None:
    before = (here / "recipe.yaml").read_bytes()
    stdout, stderr = said(capsys, 2, *shlex.split(command))
    assert not stdout
    assert sentence in stderr.splitlines()[-1]
    assert stderr.startswith("usage: ") or len(stderr.splitlines()) == 1
    assert (here / "recipe.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("a: wrong"), 2, "a: wrong"),
        (StepError("a: failed"), 1, "a: failed"),
        (BundleError("a: damaged"), 1, "a: damaged"),
        (SetupError("a: missing"), 3, "a: missing"),
        (KeyboardInterrupt(), 130, "mlcbuild: interrupted"),
        (
            OSError(errno.ENOSPC, "No space left on device", "a"),
            1,
            "mlcbuild: a: nothing more can be written: No space left on device",
        ),
        (
            RuntimeError("two\nlines"),
            1,
            "mlcbuild: a defect of mlcbuild, please report it: RuntimeError: two lines "
            "(MLCBUILD_DEBUG=1 shows where)",
        ),
    ],
)
def test_errors_are_one_line_with_their_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Out, error: BaseException, code: int, line: str
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.delenv("MLCBUILD_DEBUG", raising=False)
    monkeypatch.setattr("mlcbuild.cli.listing.models", fail)
    assert said(capsys, code, "models") == ("", line + "\n")
    monkeypatch.setenv("MLCBUILD_DEBUG", "1")
    assert main(["models"]) == code
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, RuntimeError)


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_directory_that_was_removed_is_named(tmp_path: Path, verb: str) -> None:
    (tmp_path / "gone").mkdir()
    recipe = shlex.quote(str(ROOT / "recipes" / "quickstart.yaml"))
    script = f"cd gone && rmdir ../gone && exec {shlex.quote(sys.executable)} -m mlcbuild {verb} {recipe}"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "MLCBUILD_STORE": "store"}
    result = subprocess.run(
        script, shell=True, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "mlcbuild: the current directory was removed: change to another one\n"


@pytest.mark.parametrize(
    "command", ["chat {} hi", "serve name={}", "init {}", "validate {}", "run {}", "publish {}", "report {}"]
)
def test_a_path_that_is_too_long_is_no_defect(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setenv("MLCBUILD_STORE", str(tmp_path / "store"))
    _, stderr = said(capsys, 2, *command.format("x" * 300).split())
    assert re.fullmatch(
        r"mlcbuild: (name=)?x{300}(/config.json)?: File name too long; name another path\n", stderr
    )


def test_a_directory_that_may_not_be_examined_is_no_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    def fail(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", fail)
    _, stderr = said(capsys, 2, "validate", "secret/recipe.yaml")
    assert stderr == "mlcbuild: secret/recipe.yaml: Permission denied; name another path\n"


@pytest.mark.parametrize(
    "command",
    [
        "validate recipe.yaml",
        "plan recipe.yaml",
        "plan recipe.yaml --only tiny-q0f32-host",
        "run recipe.yaml --dry-run",
        "cache status",
        "targets",
        "models",
        "schemes",
        f"inspect {BUNDLE}",
        f"verify {BUNDLE}",
        "doctor",
    ],
)
def test_json_is_one_document_and_nothing_else(built: Path, capsys: Out, command: str) -> None:
    stdout, stderr = said(capsys, 0, *command.split(), "--json")
    assert json.loads(stdout)
    assert not stderr
    plain, _ = said(capsys, 0, *command.split())
    assert not plain.lstrip().startswith("{")


def test_every_verb_that_states_facts_takes_json() -> None:
    without = {name for name, verb in VERBS.items() if cli._json not in verb.configure}
    assert without == {
        *("init", "lock", "explain", "graph", "serve", "chat", "schema", "matrix", "report", "worker", "rm"),
        "completion",
    }


def test_run_json_is_one_document_and_its_log_goes_elsewhere(built: Path, common_store: Path) -> None:
    result = mlcbuild("run", "recipe.yaml", "--json", store=common_store, cwd=built)
    document = json.loads(result.stdout)
    assert [set(item) for item in document["variants"]] == [{"name", "bundle", "status", "note"}] * 3
    assert {item["status"] for item in document["steps"]} == {"reused"}
    plan = json.loads(checked(mlcbuild("plan", "recipe.yaml", "--json", store=common_store, cwd=built)))
    assert {item["status"] for item in plan["steps"]} == {"hit"}
    assert [item["key"] for item in plan["steps"]] == [item["key"] for item in document["steps"]]


def test_a_store_that_is_not_there_yet_is_empty(here: Path, capsys: Out) -> None:
    stdout, _ = said(capsys, 0, "cache", "status")
    assert stdout.endswith("0 records, 0 files, 0 B\n")
    assert said(capsys, 0, "cache", "verify")[0] == "0 records and 0 files are as they were written\n"
    assert not Path(os.environ["MLCBUILD_STORE"]).exists()


@pytest.mark.parametrize("below", ["", "store"])
def test_a_store_that_cannot_be(here: Path, tmp_path: Path, capsys: Out, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    root = str(tmp_path / "file" / below)
    for code, command in (
        (1, ["run", "recipe.yaml", "--only", "config/tiny"]),
        (1, ["cache", "status"]),
        (1, ["cache", "verify"]),
    ):
        stdout, stderr = said(capsys, code, *command, "--store", root)
        assert not stdout
        assert str(tmp_path / "file") in stderr
        assert len(stderr.splitlines()) == 1
    stdout, _ = said(capsys, 3, "doctor", "--store", root)
    assert "set MLCBUILD_STORE to a directory of yours" in stdout
    assert (tmp_path / "file").read_text() == "mine"


def test_a_damaged_store_is_told_and_mended_by_the_next_run(place: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = ("run", "recipe.yaml", "--only", "config/tiny")
    checked(mlcbuild(*command, store=store, cwd=place))
    files = (path for path in (store / "cas").rglob("*") if path.is_file())
    (blob,) = (path for path in files if b'"hidden_size"' in path.read_bytes())
    blob.chmod(0o644)
    blob.write_bytes(b"x" * blob.stat().st_size)
    result = mlcbuild("cache", "verify", store=store)
    assert result.returncode == 1
    assert "config/tiny" in result.stdout
    assert not result.stderr
    assert "1 built, 0 reused" in checked(mlcbuild(*command, store=store, cwd=place))
    checked(mlcbuild("cache", "verify", store=store))


def test_a_failed_step_shows_its_reason_and_log_and_gives_code_1(place: Path, tmp_path: Path) -> None:
    recipe = project(tmp_path, QUICKSTART.replace("verify:", "#"))
    weights = tmp_path / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"model.norm.weight", b"model.norm.wrong_", 1))
    result = mlcbuild("run", recipe, "--only", "weights/*", store=tmp_path / "store")
    assert result.returncode == 1
    assert "Traceback" not in result.stdout + result.stderr
    assert "failed  " in result.stdout
    assert "model.safetensors" in result.stdout
    log = result.stdout.partition("  log: ")[2].splitlines()[0]
    assert Path(log).is_file()
    assert " failed" in result.stdout.splitlines()[-1]
    again = mlcbuild("run", recipe, "--only", "weights/*", "--json", store=tmp_path / "store")
    assert again.returncode == 1
    states = {item["name"]: item["status"] for item in json.loads(again.stdout)["steps"]}
    assert states["config/tiny"] == "reused"
    assert "failed" in states.values(), "a failure is not kept"
