"""Tests of installing a model: what is built or downloaded, what is refused, and what is left behind."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlcbuild_format import bundle as form

from mlcbuild import locking, recipe, session
from mlcbuild.build.events import Reporter, silent
from mlcbuild.bundles.publish import artifact
from mlcbuild.checkpoints import hub
from mlcbuild.checkpoints.hub import HubFile, HubSource
from mlcbuild.errors import (
    CompileError,
    InputError,
    Problem,
    PublishError,
    StoreError,
    UsageError,
)
from mlcbuild.installed import entries
from mlcbuild.installed import install as installing
from mlcbuild.installed.entries import InstallOptions
from mlcbuild.installed.install import activity_lock, install, recipe_text, remove_unfinished
from mlcbuild.installed.resolve import bundles, machine_words
from mlcbuild.store.locks import try_lock
from tests.bundles import bundle_files
from tests.conftest import TINY
from tests.memory_registry import MemoryRegistries, digest_of

WORDS = "x86_64-unknown-linux-gnu x86-64-v3"
ADDRESS = "hf://org/model"


class Session:
    """A stand-in for the session that builds a recipe. It records its calls and the opened recipes, and each
    run writes a manifest in place of a bundle. If `error` is set, opening or checking raises it."""

    def __init__(self, store: Path) -> None:
        self.calls: list[str] = []
        self.recipes: list[recipe.Recipe] = []
        self.error: Exception | None = None
        self.is_interrupted, self.writes_bundle = False, True
        self.on_event: object = None
        self._store = store

    def open(self, path: Path, *, store: Path, allow_outside: bool) -> Session:
        self.calls.append("open")
        if isinstance(self.error, InputError):
            raise self.error
        assert (store, allow_outside) == (self._store, True)
        self.path = path
        self.recipes.append(recipe.load(path, None, allow_outside=True))
        return self

    def unverified(self) -> Session:
        self.calls.append("unverified")
        return self

    def run(self, execution: session.Execution, on_event: object) -> Any:
        assert execution.handle_signals
        self.calls.append("run")
        self.on_event = on_event
        if self.writes_bundle and self.error is None:
            write_bundle(self.path.parent / "bundle")
        return SimpleNamespace(run=SimpleNamespace(interrupted=self.is_interrupted), check=self._check)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


def write_bundle(directory: Path) -> None:
    directory.mkdir()
    (directory / entries.MANIFEST).write_text("{}")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch, store: Path) -> Session:
    actual = Session(store)
    monkeypatch.setattr(session, "open", actual.open)
    monkeypatch.setattr(locking, "lock", lambda path: actual.calls.append("lock"))
    return actual


def hub_with(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Replaces the listing of a model hub by one in which every repository has one commit with files of the
    names `names`, of 1000 bytes each."""

    def list_files(source: HubSource) -> tuple[str, dict[str, HubFile]]:
        return "0" * 40, {name: HubFile(1000, "0" * 40, None) for name in names}

    monkeypatch.setattr(hub, "list_files", list_files)


def test_a_checkpoint_is_built_with_a_recipe_and_kept(building: Session, store: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(TINY, tmp_path / "tiny"))
    notes: list[str] = []
    entry = install(str(checkpoint), WORDS, InstallOptions(store, note=notes.append))
    assert building.calls == ["open", "unverified", "run"] and building.on_event is silent
    assert entries.read(store) == (entry,) and entry.is_complete and entry.is_default
    assert (entry.name, entry.target, entry.source) == (f"tiny-{entry.scheme}", WORDS, str(checkpoint))
    assert {*entry.files} == {path.name for path in TINY.iterdir()}
    ((name, model),) = building.recipes[0].models.items()
    assert (name, getattr(model.source, "path", None)) == ("tiny", checkpoint)
    assert [*building.recipes[0].schemes] == [entry.scheme] and [*building.recipes[0].targets] == ["host"]
    (note,) = notes
    assert note.startswith(f"{checkpoint}: built for this machine, x86-64-v3, with {entry.scheme}, since a")
    assert note.endswith("(--scheme chooses another)")


def test_a_scheme_that_the_user_names_is_no_default(building: Session, store: Path) -> None:
    notes: list[str] = []
    entry = install(str(TINY), WORDS, InstallOptions(store, "q4f16_1", notes.append))
    assert (entry.name, entry.is_default) == ("tiny-q4f16_1", False)
    assert notes == [f"{TINY}: built for this machine, x86-64-v3, with q4f16_1"]


def test_progress_goes_to_the_watcher(building: Session, store: Path) -> None:
    reporter = cast(Reporter, lambda event: None)
    watch: Callable[[], AbstractContextManager[Reporter]] = lambda: nullcontext(reporter)  # noqa: E731
    install(str(TINY), WORDS, InstallOptions(store, "q4f16_1", watch=watch))
    assert building.on_event is reporter


def test_a_model_of_a_hub_is_locked(building: Session, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_with(monkeypatch, "config.json", "model.safetensors")
    entry = install(ADDRESS, WORDS, InstallOptions(store))
    assert building.calls == ["lock", "open", "unverified", "run"] and entry.files == {}
    hub_with(monkeypatch, "a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf")
    install(f"{ADDRESS}/a.gguf", WORDS, InstallOptions(store))
    install(f"{ADDRESS}/b-00001-of-00002.gguf", WORDS, InstallOptions(store))
    assert building.calls.count("run") == 3


@pytest.mark.parametrize("source", ["oci://host/team/name:v1", ADDRESS])
def test_a_published_bundle_is_downloaded(
    source: str, building: Session, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_with(monkeypatch, "bundle.json", "config.json")
    pulled: list[tuple[str, Path]] = []

    def pull(address: str, directory: Path) -> None:
        pulled.append((address, directory))
        write_bundle(directory)

    monkeypatch.setattr(installing, "pull", pull)
    notes: list[str] = []
    entry = install(source, WORDS, InstallOptions(store, note=notes.append))
    assert pulled == [(source, entry.bundle)] and building.calls == []
    assert (entry.scheme, entry.target, entry.files) == ("", "", {}) and entries.read(store) == (entry,)
    assert notes == [f"{source}: a published bundle, which is fetched and kept as {entry.name}"]
    with pytest.raises(UsageError, match="it is a published bundle, which has its scheme: leave --scheme"):
        install(source, WORDS, InstallOptions(store, "q4f16_1"))


@pytest.mark.parametrize(
    ("source", "scheme", "message"),
    [
        (str(TINY), "q4f61", "--scheme: 'q4f61' is not a scheme; did you mean 'q4f16_1'?"),
        ("oci://host/name", None, "'oci://host/name' lacks a tag"),
        (f"{ADDRESS}/c.gguf", None, f"{ADDRESS}/c.gguf: "),
        (
            ADDRESS,
            None,
            f"holds neither bundle.json nor config.json: name a GGUF file in it, {ADDRESS}/a.gguf",
        ),
    ],
)
def test_sources_that_cannot_be_installed(
    source: str, scheme: str | None, message: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_with(monkeypatch, "b.gguf", "a.gguf")
    with pytest.raises(UsageError) as caught:
        install(source, WORDS, InstallOptions(store, scheme))
    assert message in str(caught.value)
    assert not store.exists()


def nothing_is_left(store: Path) -> bool:
    """Returns True if the store holds no part of a model; the lock of installations may stay."""
    return all(path == activity_lock(store) for path in (store / entries.DIRECTORY).iterdir())


def test_problems_of_the_recipe_are_those_of_the_source(building: Session, store: Path) -> None:
    """Checks that error messages about a model that is installed by name state the model's source. They do
    not mention the recipe, which was generated and which the user has never read."""
    texts = ("model 'tiny': config.json is missing", f"{TINY}: it is damaged")
    building.error = InputError([Problem("recipe.yaml", line, 3, text) for line, text in enumerate(texts)])
    with pytest.raises(UsageError) as caught:
        install(str(TINY), WORDS, InstallOptions(store))
    assert str(caught.value) == f"{TINY}: config.json is missing\n{TINY}: it is damaged"
    assert nothing_is_left(store)


def test_a_build_that_fails_leaves_nothing(building: Session, store: Path) -> None:
    building.error = CompileError("no")
    with pytest.raises(CompileError):
        install(str(TINY), WORDS, InstallOptions(store))
    assert nothing_is_left(store)
    building.error, building.is_interrupted, building.writes_bundle = None, True, False
    with pytest.raises(KeyboardInterrupt):
        install(str(TINY), WORDS, InstallOptions(store))
    assert nothing_is_left(store)


def test_a_download_that_fails_leaves_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(address: str, directory: Path) -> None:
        directory.mkdir()
        raise PublishError("no")

    monkeypatch.setattr(installing, "pull", pull)
    with pytest.raises(PublishError):
        install("oci://host/name:v1", WORDS, InstallOptions(store))
    assert nothing_is_left(store)


def test_an_interrupted_download_of_a_bundle_goes_on(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the parts of a bundle stay until the next download or garbage collection."""
    registries = MemoryRegistries()
    monkeypatch.setattr(artifact, "Registry", registries.registry)
    source, weights = "oci://host/name:v1", bundle_files.CONTENTS["weights.bin"]
    manifest, files = bundle_files.write_bundle(tmp_path / "bundle")
    monkeypatch.setattr(form, "check", lambda path, full: manifest)  # it holds no real library
    artifact.push(tmp_path / "bundle", manifest, files, source, {})

    def interrupted() -> None:
        registries.answers[digest_of(weights)] = [[weights[:20], KeyboardInterrupt()]]
        with pytest.raises(KeyboardInterrupt):
            install(source, WORDS, InstallOptions(store))

    interrupted()
    assert entries.read(store) == ()
    started = try_lock(activity_lock(store), shared=True, keep=True)
    assert started is not None
    with started:
        remove_unfinished(store)
    registries.calls.clear()
    entry = install(source, WORDS, InstallOptions(store))
    assert "blob 20" in registries.calls
    assert bundle_files.contents_of(entry.bundle) == bundle_files.contents_of(tmp_path / "bundle")
    shutil.rmtree(entry.bundle)
    interrupted()
    remove_unfinished(store)
    assert [path.name for path in entry.directory.iterdir()] == ["installed.json"]
    entries.remove(entry)
    interrupted()
    remove_unfinished(store)
    assert nothing_is_left(store)
    remove_unfinished(tmp_path / "nothing")


def test_a_model_that_another_process_installs_is_waited_for(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled, waiting = list[str](), threading.Event()

    def pull(address: str, directory: Path) -> None:
        pulled.append(address)
        assert waiting.wait(60)
        write_bundle(directory)

    def note(line: str) -> None:
        if re.fullmatch(
            r"oci://host/name:v1: another mlcbuild installs it \(.*\): waiting for its end", line
        ):
            waiting.set()

    monkeypatch.setattr(installing, "pull", pull)
    options = InstallOptions(store, note=note)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: bundles("oci://host/name:v1", options), range(2))
    assert first == second == (store / "installed" / "name-v1" / "bundle",) and len(pulled) == 1
    assert {path.name for path in (store / "installed").iterdir()} == {".installing.lock", "name-v1"}


def test_a_model_whose_checkpoint_is_gone_is_used_but_not_built_again(store: Path, tmp_path: Path) -> None:
    directory, source = store / entries.DIRECTORY / "tiny", str(tmp_path / "gone" / "tiny")
    directory.mkdir(parents=True)
    write_bundle(directory / "bundle")
    entries.InstalledModel(
        directory, source, "q8f16_1", machine_words(), files={"config.json": (1, 1)}
    ).write()
    assert bundles("tiny", InstallOptions(store)) == (directory / "bundle",)
    with pytest.raises(UsageError, match=f"^{source}: the checkpoint cannot be read: No such file"):
        bundles("tiny", InstallOptions(store, "q4f16_1"))


def test_a_store_that_cannot_be_written_is_named(building: Session, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"/file/installed/tiny-q4f16_1: cannot be written: Not a directory"):
        install(str(TINY), WORDS, InstallOptions(tmp_path / "file", "q4f16_1"))


def test_names_are_quoted_in_a_recipe(tmp_path: Path) -> None:
    place = tmp_path / 'a "b": é'
    place.mkdir()
    (tmp_path / "recipe.yaml").write_text(recipe_text("no", str(place), "q0f32"), encoding="utf-8")
    ((name, model),) = recipe.load(tmp_path / "recipe.yaml", None, allow_outside=True).models.items()
    assert (name, getattr(model.source, "path", None)) == ("no", place)
