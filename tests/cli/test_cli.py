"""The command line as users meet it: help, mistakes, exit codes, JSON, signals, odd outputs."""

from __future__ import annotations

import argparse
import errno
import json
import os
import pty
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from importlib.util import find_spec
from pathlib import Path

import pytest
from blake3 import blake3
from mlcbuild_format.errors import BundleError, SetupError

from mlcbuild import cli
from mlcbuild.cli import VERBS, main, parser
from mlcbuild.documents.schema import schema
from mlcbuild.errors import StepError, UsageError
from mlcbuild.installed.default_scheme import choose_scheme, parameter_count
from mlcbuild.installed.resolve import machine_words
from mlcbuild.models.parsing import family_names
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.targets.presets import presets
from tests.conftest import QUICKSTART, ROOT, checked, mlcbuild, project

Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with `recipe.yaml` and its model; nothing is built. Read only."""
    directory = tmp_path_factory.mktemp("place")
    project(directory, QUICKSTART)
    shutil.copy(ROOT / "recipes" / "prompts" / "tiny.txt", directory / "prompts.txt")
    return directory


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes `place` the current directory, with an empty store of this test's own, and returns it."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("MLCBUILD_STORE", str(tmp_path / "store"))
    return place


@pytest.fixture
def built(tiny_bundles: Path, common_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the built quickstart as the current directory."""
    monkeypatch.chdir(tiny_bundles)
    monkeypatch.setenv("MLCBUILD_STORE", str(common_store))
    return tiny_bundles


BUNDLE = "dist/tiny-q4f16_1-host"
UNSET = ("CI", "NO_COLOR", "COLUMNS", "PYTHONUNBUFFERED", "MLCBUILD_DEBUG")


def environment(store: Path, **variables: str) -> dict[str, str]:
    """Returns the environment variables for a process of its own with this store."""
    outer = {name: value for name, value in os.environ.items() if name not in UNSET}
    ours = {"MLCBUILD_STORE": str(store), "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    return {**outer, **ours, **variables}


def said(out: Out, code: int, *argv: str) -> tuple[str, str]:
    """Returns stdout and stderr of a command, after asserting that it ends with this exit code."""
    found = main(argv)
    stdout, stderr = out.readouterr()
    assert found == code, stdout + stderr
    assert "Traceback" not in stdout + stderr
    return stdout, stderr


# Help


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
        assert f"    {name:<10}{verb.help}\n" in stdout
    assert said(capsys, 0, "--version")[0].startswith("mlcbuild 0.")
    assert said(capsys, 2) == ("", stdout), "without a verb, help goes to stderr"


# Mistakes on the command line


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--nope", "mlcbuild: '--nope' stands before the verb: write mlcbuild VERB [OPTIONS]"),
        ("--json plan recipe.yaml", "mlcbuild: '--json' stands before the verb"),
        ("rnu recipe.yaml", "mlcbuild: 'rnu' is not a verb; did you mean 'run'?"),
        ("make", "mlcbuild: 'make' is not a verb; known: bench, cache, chat, doctor, "),
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
        ("validate tiny", "tiny: cannot read this file: it is a directory, not a regular file"),
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


# Errors that verbs raise


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


# Verbs that state facts


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
        *("init", "lock", "explain", "graph", "serve", "chat", "schema", "matrix", "report", "worker", "rm")
    }


def test_run_json_is_one_document_and_its_log_goes_elsewhere(built: Path, common_store: Path) -> None:
    done = mlcbuild("run", "recipe.yaml", "--json", store=common_store, cwd=built)
    document = json.loads(done.stdout)
    assert [set(item) for item in document["variants"]] == [{"name", "bundle", "status", "note"}] * 3
    assert {item["status"] for item in document["steps"]} == {"reused"}
    plan = json.loads(checked(mlcbuild("plan", "recipe.yaml", "--json", store=common_store, cwd=built)))
    assert {item["status"] for item in plan["steps"]} == {"hit"}
    assert [item["key"] for item in plan["steps"]] == [item["key"] for item in document["steps"]]


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
    shutil.copytree(place / "tiny", "my model")
    stdout, _ = said(capsys, 0, "init", "my model")
    assert stdout == "recipe.yaml: run `mlcbuild run recipe.yaml`\n"
    variant = f"my-model-{choose_scheme(machine_words(), parameter_count('my model')).scheme}-host"
    for words in (["validate"], ["validate", "."]):
        assert said(capsys, 0, *words)[0].splitlines() == [variant, "recipe.yaml: 1 variant"]
    monkeypatch.chdir(tmp_path / "my model")
    assert "is the checkpoint itself: go to the directory above" in said(capsys, 2, "init", ".")[1]
    (tmp_path / "recipe.yaml").unlink()
    monkeypatch.chdir(tmp_path)
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
    done = mlcbuild("doctor", store=tmp_path / "store")
    assert done.returncode == 3
    assert "FAIL  linker       no linker for " in done.stdout
    done = mlcbuild(
        "run", "recipe.yaml", "--only", "library/*/q0f32/host", store=tmp_path / "store", cwd=place
    )
    assert done.returncode == 3
    assert done.stderr.startswith("no linker for ")
    assert "Traceback" not in done.stdout + done.stderr


# Bundles


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_what_is_no_bundle_is_refused_in_a_sentence(here: Path, capsys: Out, verb: str) -> None:
    for path, sentence in (
        ("nowhere", "nowhere: does not exist, but a bundle is a directory that holds bundle.json"),
        ("recipe.yaml", "recipe.yaml: is a file, but a bundle is a directory that holds bundle.json"),
        ("tiny", "tiny: there is no bundle.json in it, so it is not a bundle"),
    ):
        stdout, stderr = said(capsys, 1, verb, path)
        assert not stdout
        assert stderr.rstrip("\n").endswith(sentence)
        assert len(stderr.splitlines()) == 1


def _manifest(bundle: Path) -> None:
    (bundle / "bundle.json").write_text("{")


def _library(bundle: Path) -> None:
    (bundle / "library.json").unlink()


def _facts_of_library(bundle: Path) -> None:
    path = bundle / "library.json"
    path.write_text("[" + " " * (path.stat().st_size - 2) + "]")


def _weights(bundle: Path) -> None:
    (path,) = bundle.glob("weights*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "verbs", "sentence"),
    [
        (_manifest, ("inspect", "verify", "serve", "chat"), "bundle.json: not valid JSON"),
        (_library, ("inspect", "verify", "serve", "chat"), "library.json: missing, but bundle.json lists it"),
        (_facts_of_library, ("inspect", "verify", "serve", "chat"), "library.json: has BLAKE3 "),
        (_weights, ("verify",), "weights-00001-of-00001.safetensors: "),
    ],
)
def test_a_damaged_bundle_is_refused_in_a_sentence(
    bundle_copy: Callable[[str], Path],
    capsys: Out,
    damage: Callable[[Path], None],
    verbs: tuple[str, ...],
    sentence: str,
) -> None:
    bundle = bundle_copy("q4f16_1")
    damage(bundle)
    for verb in verbs:
        stdout, stderr = said(capsys, 1, verb, str(bundle))
        assert not stdout
        assert sentence in stderr
        assert len(stderr.splitlines()) == 1


def _manifest_with(**values: object) -> Callable[[Path], None]:
    def damage(bundle: Path) -> None:
        path = bundle / "bundle.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | values))

    return damage


def _fifo(bundle: Path) -> None:
    (bundle / "bundle.json").unlink()
    os.mkfifo(bundle / "bundle.json")


def _other_facts(text: str) -> Callable[[Path], None]:
    """Returns another library.json, of which the manifest knows."""

    def damage(bundle: Path) -> None:
        (bundle / "library.json").write_text(text)
        path = bundle / "bundle.json"
        found = json.loads(path.read_bytes())
        digest = blake3(text.encode()).hexdigest()
        found["files"]["library.json"] = {"blake3": digest, "size": len(text)}
        path.write_text(json.dumps(found))

    return damage


EVERY = ("inspect", "verify", "serve", "chat")
REFUSED: list[tuple[Callable[[Path], None], tuple[str, ...], str]] = [
    (lambda bundle: (bundle / ".DS_Store").touch(), EVERY, ".DS_Store: the manifest does not list this file"),
    (
        lambda bundle: (bundle / "adapters").mkdir(),
        EVERY,
        "adapters: the manifest does not list this dir",
    ),
    (_fifo, EVERY, "bundle.json: not a regular file"),
    (
        _manifest_with(name="\x1b[31m\r\n"),
        EVERY,
        "'name' must be a non-empty string of at most 1000 printable",
    ),
    (_manifest_with(name="\ud800"), EVERY, "half of a surrogate pair"),
    (_manifest_with(verification={}), EVERY, "'verification.kl_mean' is missing"),
    (_manifest_with(scheme={}), EVERY, "'scheme.name' is missing"),
    (_manifest_with(**{"\x1b[2J": 1}), EVERY, "unknown field '\\x1b[2J'"),
    (_other_facts("[" * 100_000), ("inspect",), "library.json: not valid JSON"),
    (_other_facts("[]"), ("inspect",), "library.json: must hold a JSON object"),
    (
        _other_facts('{"kernels": {"a": "\\u001b[31m"}}'),
        ("inspect",),
        "'kernels.a' must be a non-empty string",
    ),
    (_other_facts('{"kernels": []}'), ("inspect",), "library.json: kernels must be an object"),
]


@pytest.mark.parametrize(("damage", "verbs", "sentence"), REFUSED)
def test_a_strangers_bundle_is_refused_in_a_line(
    bundle_copy: Callable[[str], Path],
    capsys: Out,
    damage: Callable[[Path], None],
    verbs: tuple[str, ...],
    sentence: str,
) -> None:
    bundle = bundle_copy("q4f16_1")
    damage(bundle)
    for verb in verbs:
        stdout, stderr = said(capsys, 1, verb, str(bundle))
        assert not stdout
        assert sentence in stderr
        assert stderr.endswith("\n") and stderr[:-1].isprintable(), stderr


def test_what_is_added_to_a_bundle_does_not_pass_with_its_provenance(
    bundle_copy: Callable[[str], Path], capsys: Out
) -> None:
    bundle = bundle_copy("q4f16_1")
    said(capsys, 0, "verify", str(bundle), "--provenance")
    (bundle / "chat_template.json").write_text("{}")
    _, stderr = said(capsys, 1, "verify", str(bundle), "--provenance")
    assert "chat_template.json: the manifest does not list this file" in stderr


def test_a_strangers_provenance_is_shown_escaped(bundle_copy: Callable[[str], Path], capsys: Out) -> None:
    bundle = bundle_copy("q4f16_1")
    path = bundle / "provenance.json"
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(document | {"x": "\x9b31m\u202e\ud800"}))
    stdout, _ = said(capsys, 0, "verify", str(bundle), "--provenance", "--json")
    assert json.loads(stdout)["statement"]["x"] == "\x9b31m\u202e\ud800"
    assert stdout.replace("\n", "").isprintable()
    path.write_text(json.dumps(document)[:-2] + ',"x":' + "[" * 900 + "]" * 900 + "}")
    _, stderr = said(capsys, 1, "verify", str(bundle), "--provenance", "--json")
    assert "provenance.json: it is not an in-toto statement" in stderr
    document["subject"][0]["digest"]["sha256"] = "\x1b[2J"
    path.write_text(json.dumps(document))
    _, stderr = said(capsys, 1, "verify", str(bundle), "--provenance")
    assert "sha256 \\x1b[2J" in stderr


def test_inspect_says_what_a_bundle_is(built: Path, capsys: Out) -> None:
    rows = [line.split(maxsplit=1) for line in said(capsys, 0, "inspect", BUNDLE)[0].splitlines()]
    facts = {name: text for name, text in rows if name != "kernel"}
    manifest = json.loads((built / BUNDLE / "bundle.json").read_bytes())
    assert facts["name"] == manifest["name"]
    assert facts["signature"] == manifest["signature"]
    assert facts["limits"] == "context 256, prefill 128, batch 8"
    assert f"top-1 agreement {manifest['verification']['top1_agreement']}" in facts["verified"]
    document = json.loads(said(capsys, 0, "inspect", BUNDLE, "--json")[0])
    assert {**manifest, "kernels": document["kernels"], "fallbacks": document["fallbacks"]} == document
    uses = [use for name, text in rows if name == "kernel" for use in text.split(" for ")[1].split(", ")]
    assert sorted(uses) == sorted(use.removesuffix(".weight") for use in document["kernels"])


def test_inspect_names_what_is_slow(bundle_copy: Callable[[str], Path], capsys: Out) -> None:
    bundle = bundle_copy("q4f16_1")
    about = json.loads((bundle / "library.json").read_bytes())
    reason = "no vector instructions"
    text = json.dumps({**about, "fallbacks": {"attn.o.weight": reason}}).encode()
    (bundle / "library.json").write_bytes(text)
    manifest = json.loads((bundle / "bundle.json").read_bytes())
    manifest["files"]["library.json"] = {"blake3": blake3(text).hexdigest(), "size": len(text)}
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    lines = said(capsys, 0, "inspect", str(bundle))[0].splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("slow ")] == [f"attn.o: {reason}"]


def test_a_port_that_cannot_be_is_refused_before_loading(built: Path, capsys: Out) -> None:
    _, stderr = said(capsys, 3, "serve", BUNDLE, "--port", "99999")
    assert "a port is a number from 0 to 65535" in stderr


# Stores


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
    done = mlcbuild("cache", "verify", store=store)
    assert done.returncode == 1
    assert "config/tiny" in done.stdout
    assert not done.stderr
    assert "1 built, 0 reused" in checked(mlcbuild(*command, store=store, cwd=place))
    checked(mlcbuild("cache", "verify", store=store))


def test_a_failed_step_shows_its_reason_and_log_and_gives_code_1(place: Path, tmp_path: Path) -> None:
    recipe = project(tmp_path, QUICKSTART.replace("verify:", "#"))
    weights = tmp_path / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"model.norm.weight", b"model.norm.wrong_", 1))
    done = mlcbuild("run", recipe, "--only", "weights/*", store=tmp_path / "store")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "failed  " in done.stdout
    assert "model.safetensors" in done.stdout
    log = done.stdout.partition("  log: ")[2].splitlines()[0]
    assert Path(log).is_file()
    assert " failed" in done.stdout.splitlines()[-1]
    again = mlcbuild("run", recipe, "--only", "weights/*", "--json", store=tmp_path / "store")
    assert again.returncode == 1
    states = {item["name"]: item["status"] for item in json.loads(again.stdout)["steps"]}
    assert states["config/tiny"] == "reused"
    assert "failed" in states.values(), "a failure is not kept"


# Signals


@contextmanager
def started(place: Path, store: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Yields `mlcbuild run` as a process of its own, which is ended afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mlcbuild", "run", "recipe.yaml", *more],
        cwd=place,
        env=environment(store),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            yield process
    finally:
        process.kill()


@pytest.mark.parametrize("executor", ["processes", "inline"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_built(
    place: Path, tmp_path: Path, executor: str, number: signal.Signals
) -> None:
    store = tmp_path / "store"
    with started(place, store, "--only", "library/*/q0f32/host", "--executor", executor) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("start   library/"):
                break
        process.send_signal(number)
        rest, errors = process.stdout.read(), process.stderr.read() if process.stderr else ""
        assert process.wait() == 130, rest + errors
    last = rest.splitlines()[-1]
    assert last.startswith(f"interrupted by {number.name}: 1 built, 0 reused, ")
    assert "stopped: library/" in last
    assert last.endswith("What was built is kept; run again to go on")
    assert "Traceback" not in rest + errors
    plan = json.loads(checked(mlcbuild("plan", "recipe.yaml", "--json", store=store, cwd=place)))
    assert {item["name"] for item in plan["steps"] if item["status"] == "hit"} == {"config/tiny"}
    checked(mlcbuild("cache", "verify", store=store))


# Odd outputs


def test_a_reader_that_leaves_early_is_no_error_but_ends_a_run(place: Path, tmp_path: Path) -> None:
    def without_reader(*command: str) -> tuple[int, str]:
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "mlcbuild", *command],
            cwd=place,
            env=environment(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(writing)
        return done.returncode, done.stderr

    assert without_reader("schema") == (0, "")
    assert without_reader("models") == (0, "")
    assert without_reader("run", "recipe.yaml", "--only", "config/tiny") == (1, "")


@pytest.mark.parametrize(
    ("command", "code", "stderr"),
    [
        ("models >&-", 0, ""),
        ("nope >&-", 2, "mlcbuild: 'nope' is not a verb; "),
        ("nope 2>&-", 2, ""),
        ("models <&-", 0, ""),
        ("run recipe.yaml --only config/tiny >&- <&-", 0, ""),
    ],
)
def test_closed_streams(place: Path, tmp_path: Path, command: str, code: int, stderr: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{shlex.quote(sys.executable)} -m mlcbuild {command}"],
        cwd=place,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.startswith(stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", ["models", "schema"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_below_stdout(tmp_path: Path, command: str, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mlcbuild", command],
            env=environment(tmp_path, PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.endswith(" written: No space left on device\n")
    assert len(done.stderr.splitlines()) == 1


def on_a_terminal(columns: int, place: Path, store: Path, **variables: str) -> tuple[int, str]:
    """Returns what a person sees of a short run on a terminal of this width."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 10, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "mlcbuild", "run", "recipe.yaml", "--only", "config/tiny"],
        cwd=place,
        env=environment(store, TERM="xterm-256color", **variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    return process.wait(), seen.decode()


@pytest.mark.parametrize("columns", [0, 10, 200])
def test_a_terminal_of_any_width(place: Path, tmp_path: Path, columns: int) -> None:
    code, seen = on_a_terminal(columns, place, tmp_path)
    assert code == 0, seen
    assert "\x1b[" in seen, "the live view moves the cursor"
    flat = seen.replace("\r", "").replace("\n", "")
    assert "config/tiny in" in flat
    assert "1 built, 0 reused in" in flat


def test_lines_on_a_terminal_in_ci(place: Path, tmp_path: Path) -> None:
    code, seen = on_a_terminal(80, place, tmp_path, CI="true")
    assert code == 0
    assert "\x1b[" not in seen
    assert seen.startswith("start   config/tiny (never built)")
