"""Tests of models used by name: what `chat` and `serve` build, fetch, keep, list and remove."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from mlcbuild.cli import everyday, main
from mlcbuild.errors import UsageError
from mlcbuild.installed import entries
from mlcbuild.installed.default_scheme import choose_scheme, parameter_count
from mlcbuild.installed.entries import InstallOptions
from mlcbuild.installed.resolve import bundles, machine_words
from tests import product
from tests.conftest import TINY, checked, mlcbuild
from tests.gguf_files import tiny_metadata, write_gguf
from tests.hub import Hub

pytestmark = pytest.mark.xdist_group("everyday")  # so that one process compiles the libraries
QUESTION = ("What is 2 + 3?", "--temperature", "0")
Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of a new store that all tests of this module share, so that they compile one library
    only."""
    return tmp_path_factory.mktemp("everyday") / "store"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(TINY, tmp_path_factory.mktemp("checkpoint") / "tiny")


def ask(name: str | Path, store: Path, *more: str, **variables: str) -> tuple[str, str]:
    """Asks the model `name` one question with `mlcbuild chat`. Returns (its answer, the text on standard
    error). more: further arguments; variables: environment variables."""
    result = mlcbuild("chat", name, *QUESTION, *more, store=store, variables=variables)
    return checked(result).strip(), result.stderr


def names(store: Path) -> dict[str, str]:
    """Returns name -> source of the models that `mlcbuild list` prints."""
    listed = json.loads(checked(mlcbuild("list", "--json", store=store)))["models"]
    return {item["name"]: item["source"] for item in listed}


def test_a_checkpoint_is_built_once_kept_listed_and_removed(checkpoint: Path, store: Path) -> None:
    answer, stderr = ask(checkpoint, store)
    assert answer == "5"
    choice = choose_scheme(machine_words(), parameter_count(str(checkpoint)))
    scheme = choice.scheme
    assert f"with {scheme}, {choice.reason} (--scheme chooses another)" in stderr.splitlines()[0]
    assert scheme.startswith("q8"), "4 bits lose too much of a small model"
    assert ask(checkpoint, store) == ("5", ""), "the second time nothing is built or planned"
    name = f"tiny-{scheme}"
    assert names(store) == {name: str(checkpoint)}
    assert ask(name, store) == ("5", ""), "its name is enough"
    arguments = Namespace(store=str(store), scheme=None)
    assert [*everyday._served(name, arguments)] == [f"{name}={store}/installed/{name}/bundle"]
    assert [*everyday._served(f"t={name}", arguments)] == [f"t={store}/installed/{name}/bundle"]
    config = checkpoint / "config.json"
    config.write_text(config.read_text() + "\n")
    assert ask(checkpoint, store)[1], "a checkpoint that was changed is built again"
    removed = checked(mlcbuild("rm", name, store=store))
    assert f"{name}: " in removed and "the steps that built them stay" in removed
    assert names(store) == {}
    assert "nothing is installed" in checked(mlcbuild("list", store=store))


def test_a_gguf_file_answers(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "little.gguf"
    write_gguf(TINY, path, "Q8_0", metadata=tiny_metadata(TINY))
    answer, _ = ask(tmp_path, store, "--scheme", "as-is")
    assert answer == "5", "a directory with one GGUF file means that file, and its values may be kept"
    assert list(names(store).values()) == [str(path)]
    write_gguf(TINY, tmp_path / "other.gguf")
    result = mlcbuild("chat", tmp_path, "hi", store=store)
    assert result.returncode == 2 and "it holds 2 GGUF files: name one, such as" in result.stderr
    checked(mlcbuild("rm", path, store=store))


def test_a_model_of_a_hub_is_pinned_and_answers_without_it(store: Path, tmp_path: Path) -> None:
    source = "hf://org/tiny"
    with Hub() as hub:
        hub.add("org/tiny", {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()})
        variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        assert ask(source, store, **variables)[0] == "5"
        hub.add("org/notes", {"README.md": b"nothing"})
        result = mlcbuild("chat", "hf://org/notes", "hi", store=store, variables=variables)
        assert result.returncode == 2
        assert result.stderr == "hf://org/notes: it holds neither bundle.json nor config.json\n"
    assert ask(source, store) == ("5", ""), "the hub is gone, and not asked"
    checked(mlcbuild("rm", source, store=store))


def test_a_gguf_file_of_a_hub_answers(store: Path, tmp_path: Path) -> None:
    write_gguf(TINY, tmp_path / "tiny.gguf", "Q8_0", metadata=tiny_metadata(TINY))
    source = "hf://org/packed/q8/tiny.gguf"
    with Hub() as hub:
        hub.add("org/packed", {"q8/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})
        variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        assert ask(source, store, **variables)[0] == "5"
        for name, sentence in (
            (
                "hf://org/packed",
                ": it holds neither bundle.json nor config.json: name a GGUF file in it, ",
            ),
            ("hf://org/packed/q8/tini.gguf", ": there is no file q8/tini.gguf; did you mean 'q8/tiny.gguf'?"),
        ):
            done = mlcbuild("chat", name, "hi", store=store, variables=variables)
            assert done.returncode == 2 and done.stderr.startswith(f"{name}{sentence}")
    assert ask(source, store) == ("5", ""), "the hub is gone, and not asked"
    checked(mlcbuild("rm", source, store=store))


def test_a_published_bundle_is_fetched_and_kept(
    tiny_bundles: Path, store: Path, tmp_path: Path, capsys: Out
) -> None:
    files = tiny_bundles / "dist" / "tiny-q4a8_1-host"
    with Hub() as hub:
        contents = {
            path.relative_to(files).as_posix(): path.read_bytes()
            for path in files.rglob("*")
            if path.is_file()
        }
        hub.add("org/bundle", contents)
        variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        assert ask("hf://org/bundle", store, **variables)[0] == "5"
        assert ask("hf://org/bundle@main", store, **variables) == ("5", ""), "it is here already"
        result = mlcbuild(
            "chat", "hf://org/bundle", "hi", "--scheme", "q8a8_1", store=store, variables=variables
        )
        assert result.returncode == 2 and "it is a published bundle, which has its scheme" in result.stderr
    assert ask("bundle", store) == ("5", "")
    capsys.readouterr()
    everyday.listed(Namespace(store=str(store), json=True))
    schemes = {item["name"]: item["scheme"] for item in json.loads(capsys.readouterr().out)["models"]}
    assert schemes["bundle"] == "q4a8_1", "the bundle's manifest states it"
    removed = checked(mlcbuild("rm", "bundle", store=store))
    assert "steps that built" not in removed and "stay in the hub's cache" in removed


def test_a_directory_of_bundles_is_served_and_asks_for_one_to_chat(
    tiny_bundles: Path, tmp_path: Path
) -> None:
    options = InstallOptions(tmp_path / "store")
    served = bundles(str(tiny_bundles / "dist"), options)
    assert [path.name for path in served] == [
        f"tiny-{scheme}-host" for scheme in ("q0f32", "q4a8_1", "q4f16_1")
    ]
    assert bundles(str(served[0]), options) == (served[0],)
    result = mlcbuild("chat", "dist", "hi", store=tmp_path / "store", cwd=tiny_bundles)
    assert result.returncode == 2
    assert result.stderr.startswith("mlcbuild chat: dist holds 3 bundles: name one of dist/tiny-q0f32-host, ")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "the name is empty: write the directory of a bundle or checkpoint, a GGUF file, hf://"),
        ("./nosuch", "'./nosuch' is not here: write the directory of a bundle or checkpoint, a GGUF file"),
        ("bare", "/bare: it has no weights that can be read; weights must be"),
        ("nosuch", "'nosuch' is not here: write the directory of a bundle or checkpoint, a GGUF file, hf://"),
        ("org/model", "'org/model' is not here; for a model of the Hugging Face hub write hf://org/model"),
        ("s3://bucket/x", "'s3://bucket/x': an address starts with oci:// or hf://"),
        ("oci://host", "'oci://host'"),
        (
            "recipe.yaml",
            "it is neither a bundle nor a checkpoint: mlcbuild run recipe.yaml builds its bundles",
        ),
        (
            "empty",
            "empty: it holds neither bundle.json nor config.json, so it is no bundle",
        ),
        ("dist", "no bundle and no checkpoint; the bundle in dist/.tiny.refused failed its verification"),
        ("gpt", 'model_type: "gpt-17" is not a supported family'),
        ("tiny --scheme q3", "--scheme: 'q3' is not a scheme; known: as-is, q0f16, "),
    ],
)
def test_a_name_that_means_nothing_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out, name: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLCBUILD_STORE", str(tmp_path / "store"))
    (tmp_path / "recipe.yaml").write_text("version: 1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dist" / ".tiny.refused").mkdir(parents=True)
    (tmp_path / "dist" / ".tiny.refused" / "bundle.json").touch()
    (tmp_path / "tiny").symlink_to(TINY)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt-17"}')
    product.tiny_weights(tmp_path / "gpt" / "model.safetensors", "any")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}')
    assert main(["chat", *name.split(), "hi"][:-1] if "--" in name else ["chat", name, "hi"]) == 2
    stderr = capsys.readouterr().err
    assert sentence in stderr and "Traceback" not in stderr
    assert stderr.count(str(tmp_path)) <= 1, "a path stands there once"
    left = {path.name for path in (tmp_path / "store").glob("installed/*")}
    assert left <= {".installing.lock"}, "nothing stays of what failed"


def test_rm_names_what_is_installed(tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCBUILD_STORE", str(tmp_path))
    assert main(["rm", "nosuch"]) == 2
    assert capsys.readouterr().err == "'nosuch' is not installed: mlcbuild list shows what is\n"


def test_a_model_that_is_removed_while_models_are_listed(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / entries.DIRECTORY / "kept"
    directory.mkdir(parents=True)
    kept = entries.InstalledModel(directory, "/kept", "q8a8_1")
    kept.write()
    gone = entries.InstalledModel(tmp_path / entries.DIRECTORY / "gone", "/gone", "q8a8_1")
    monkeypatch.setattr(entries, "read", lambda root: (gone, kept))
    assert main(["list", "--json", "--store", str(tmp_path)]) == 0
    assert [item["name"] for item in json.loads(capsys.readouterr().out)["models"]] == ["kept"]
    assert main(["list", "--store", str(tmp_path)]) == 0
    assert "/gone" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tiny-v1", "oci://host/tiny:v1"])
def test_a_published_bundle_gets_no_other_scheme(name: str, tmp_path: Path) -> None:
    entry = entries.InstalledModel(tmp_path / entries.DIRECTORY / "tiny-v1", "oci://host/tiny:v1")
    entry.bundle.mkdir(parents=True)
    (entry.bundle / entries.MANIFEST).write_text("{}")
    entry.write()
    assert bundles(name, InstallOptions(tmp_path)) == (entry.bundle,)
    with pytest.raises(UsageError, match="it is a published bundle, which has its scheme: leave --scheme"):
        bundles(name, InstallOptions(tmp_path, "q8a8_1"))


def test_two_sources_of_one_name_have_entries_of_their_own(tmp_path: Path) -> None:
    def keep(source: str) -> Path:
        path = entries.place(tmp_path, source, "q4a8_1", "here")
        path.mkdir(parents=True)
        entries.InstalledModel(path, source, "q4a8_1", "here").write()
        return path

    paths = [keep(source) for source in ("/a/tiny", "/b/tiny", "/c/Tiny")]
    assert [path.name for path in paths] == ["tiny-q4a8_1", "tiny-q4a8_1-2", "Tiny-q4a8_1-3"]
    assert entries.place(tmp_path, "/a/tiny", "q4a8_1", "here") == paths[0]
    (paths[0] / "installed.json").write_text("[]")
    left = {entry.source for entry in entries.read(tmp_path)}
    assert left == {"/b/tiny", "/c/Tiny"}, "a damaged entry is left out"


@pytest.mark.parametrize(
    ("machine", "four", "eight"),
    [
        ("x86_64-unknown-linux-gnu x86-64-v4 +avx512vnni", "q4a8_2", "q8a8_1"),
        ("x86_64-unknown-linux-gnu x86-64-v4 +amx-bf16 +amx-tile +avx512vnni", "q4a8_1", "q8a8_1"),
        ("x86_64-unknown-linux-gnu x86-64-v3", "q4a8_2", "q8a8_1"),
        ("x86_64-unknown-linux-gnu x86-64-v2", "q4f16_1", "q8f16_1"),
        ("aarch64-unknown-linux-gnu generic +dotprod +fp16", "q4a8_2", "q8a8_1"),
        ("aarch64-unknown-linux-gnu generic", "q4f16_1", "q8f16_1"),
        ("arm64-apple-macosx11.0.0 apple-m1", "q4a8_2", "q8a8_1"),
    ],
)
def test_the_scheme_follows_the_processor(machine: str, four: str, eight: str) -> None:
    assert choose_scheme(machine).scheme == choose_scheme(machine, 7 << 30, 64 << 30).scheme == four
    small = choose_scheme(machine, 600_000_000, 8 << 30)
    assert small.scheme == eight and f"{four} is smaller" in small.reason
    between = choose_scheme(machine, 600_000_000, 1 << 30).scheme
    assert between == ("q6a8_2" if "a8" in four else four), "8 bits do not fit its memory"
    assert choose_scheme(machine, 600_000_000, 800 << 20).scheme == four, "nor do 6"
    assert "may be too large for this machine's memory" in choose_scheme(machine, 7 << 30, 4 << 30).reason


def test_a_checkpoint_that_cannot_be_read_has_no_size(tmp_path: Path) -> None:
    assert parameter_count(str(tmp_path)) is None
    assert parameter_count(str(TINY)) == 55_296 + 5 * 196_864 + 128, "embedding, layers, norm"


def test_every_line_before_a_json_log_is_an_object(checkpoint: Path, tmp_path: Path, store: Path) -> None:
    """Checks a missing model, bad usage, and a build, which come before the server's own lines."""
    for words, code, sentence in (
        (("./nosuch", "--log", "json"), 2, "'./nosuch' is not here"),
        (("x", "--log=json", "--port", "y"), 2, "mlcbuild serve: error: argument --port"),
        (("x", "--log=json", "--prot", "1"), 2, "mlcbuild serve: '--prot' is not an option"),
    ):
        result = mlcbuild("serve", *words, store=tmp_path / "store")
        assert result.returncode == code
        line = json.loads(result.stderr)
        assert line["level"] == "ERROR" and sentence in line["message"]
    other = shutil.copytree(checkpoint, tmp_path / "other")
    served = mlcbuild("serve", other, "--log", "json", "--host", "nowhere.invalid", store=store)
    *built, failed = map(json.loads, served.stderr.splitlines())
    assert served.returncode == 3 and "cannot listen on nowhere.invalid" in failed["message"]
    assert len(built) > 1 and {line["level"] for line in built} == {"INFO"}
