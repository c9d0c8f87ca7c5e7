"""Tests of loading bundles by name in one process, and of unloading them when others need memory."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlcbuild_format import bundle
from mlcbuild_format.errors import BundleError, RequestError, SetupError
from mlcbuild_runtime import untrusted
from mlcbuild_runtime.engine import memory_modes
from mlcbuild_runtime.engine.drafts import Speculate
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.memory_modes import LimitOverrides
from mlcbuild_runtime.engine.served_models import Models, ModelSource, card
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.text.tokenizer import Tokenizer


def needs(path: Path) -> int:
    return memory_modes.choose(LimitOverrides(), bundle.manifest(path)).memory


def test_what_nobody_uses_makes_room(
    numpy_toy_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="mlcbuild_runtime")
    copies = [Path(shutil.copytree(numpy_toy_bundle, tmp_path / name)) for name in "abc"]
    # Two of the three fit.
    budget = 2 * needs(numpy_toy_bundle) + 1
    models = Models(
        [ModelSource(copy, copy.name) for copy in copies], LimitOverrides(memory=budget), threads=1
    )
    try:
        for name in ("a", "b", "a", "c"):
            models.use(name).end()
            time.sleep(0.01)
        assert [entry.names[0] for entry in models.entries if entry.engine] == ["a", "c"]
        lines = [text for text in caplog.messages if " is loaded (memory " in text]
        assert [text.split()[0] for text in lines] == ["a", "b", "c"], "one line for each loading"
        one, two = models.use("a"), models.use("c")
        with pytest.raises(RequestError, match="the models in use leave no room for it") as caught:
            models.use("b")
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        two.end()
        two.end()  # once is enough
        models.use("b").end()
        assert models.at_once("c") is None
        assert set(models.states()) == {"a", "b"}
        one.end()
        models.drain()
        assert not models.ready
        with pytest.raises(RequestError, match="stopping"):
            models.use("c")
    finally:
        assert models.close(10)


def test_no_model_is_loaded_after_the_end(numpy_toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the end of a server does not wait for a model that is being loaded, and that requests which
    wait for the next load are refused."""
    models = Models([ModelSource(numpy_toy_bundle)], LimitOverrides(), threads=1)
    load, begun, going = untrusted.load, threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:
        begun.set()
        assert going.wait(60)
        return load(*arguments)

    monkeypatch.setattr(untrusted, "load", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(models.use, None)
        assert begun.wait(60)
        second = pool.submit(models.use, None)
        has_ended = models.close(0)
        going.set()
        assert not has_ended
        first.result(60).end()
        with pytest.raises(RequestError, match="the server is stopping"):
            second.result(60)
    assert models.close(10)


class BusyEngine:
    """A stand-in for an engine that runs one step until `step_ended` is set. `seconds`: the sum of the time
    limits that `close` got."""

    def __init__(self) -> None:
        self.step_ended, self.seconds = threading.Event(), 0.0
        self.executor = SimpleNamespace(close=self._free)
        self.is_freed = False

    def _free(self) -> None:
        assert self.step_ended.is_set() and not self.is_freed
        self.is_freed = True

    def drain(self) -> None:
        pass

    def close(self, timeout: float) -> bool:
        self.seconds += timeout
        return self.step_ended.wait(min(timeout, 0.2))


def test_engines_share_the_time_in_which_they_stop(numpy_toy_bundle: Path, tmp_path: Path) -> None:
    copies = [Path(shutil.copytree(numpy_toy_bundle, tmp_path / name)) for name in "abcde"]
    models = Models([ModelSource(copy, copy.name) for copy in copies], LimitOverrides())
    engines: list[Any] = [BusyEngine() for _ in copies]
    for entry, engine in zip(models.entries, engines, strict=True):
        entry.engine = engine
    assert not models.close(0.2)
    assert sum(engine.seconds for engine in engines) < 0.3
    for engine in engines:
        engine.step_ended.set()
    assert models.close(0)


def test_a_model_whose_engine_still_computes_keeps_its_memory(numpy_toy_bundle: Path, tmp_path: Path) -> None:
    copies = [Path(shutil.copytree(numpy_toy_bundle, tmp_path / name)) for name in "abc"]
    budget = 2 * needs(numpy_toy_bundle) + 1
    models = Models(
        [ModelSource(copy, copy.name) for copy in copies], LimitOverrides(memory=budget), threads=1
    )
    try:
        used, busy = models.use("b"), BusyEngine()
        later: Any = BusyEngine()
        entry: Any = models.entries[0]
        entry.engine, entry.chosen = busy, models.entries[1].chosen
        for _ in range(2):
            with pytest.raises(RequestError, match="leave no room for it"):
                models.use("c")
        assert not busy.is_freed and set(models.states()) == {"b"}
        busy.step_ended.set()
        models.use("c").end()
        assert busy.is_freed
        used.end()
        models._stopping.append((later, 0))
        assert not models.close(0), "a server does not unload the library of a running step"
    finally:
        busy.step_ended.set()
        later.step_ended.set()
        assert models.close(10)


def test_a_model_that_is_not_here(numpy_toy_bundle: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(numpy_toy_bundle, tmp_path / "broken"))
    (broken / "bundle.json").write_text("{")
    models = Models([ModelSource(numpy_toy_bundle, "a"), ModelSource(broken, "b")], LimitOverrides())
    with pytest.raises(RequestError, match="'nobody' is not here: this server has 'a', 'b'") as caught:
        models.find("nobody")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert models.find(None) is models.entries[0] and models.at_once("a") is None
    with pytest.raises(RequestError, match=r"the model 'b' cannot be loaded: .*bundle.json") as caught:
        models.use("b")
    assert (caught.value.status, caught.value.code) == (500, "model_not_loaded")
    shown = [card(entry, 7) for entry in models.entries]
    assert [(each["id"], each["loaded"], each["created"], each["limits"]) for each in shown] == [
        ("a", False, 7, None),
        ("b", False, 7, None),
    ]
    assert shown[0]["error"] is None and "bundle.json" in str(shown[1]["error"])
    assert models.state().alive and models.ready


def test_one_bundle_under_two_names_is_loaded_once(numpy_toy_bundle: Path) -> None:
    models = Models(
        [ModelSource(numpy_toy_bundle, "a"), ModelSource(numpy_toy_bundle, "b")], LimitOverrides()
    )
    (entry,) = models.entries
    assert entry.names == ["a", "b"] and models.find("b") is entry
    assert card(entry, 0)["aliases"] == ["b"]


def test_two_bundles_of_one_name(numpy_toy_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(numpy_toy_bundle, tmp_path / "copy"))
    with pytest.raises(SetupError, match="are both called 'x': give one of them another name, NAME="):
        Models([ModelSource(numpy_toy_bundle, "x"), ModelSource(copy, "x")], LimitOverrides())
    with pytest.raises(BundleError):
        Models([ModelSource(tmp_path / "nothing")], LimitOverrides())


def test_sources(tmp_path: Path) -> None:
    assert ModelSource.of("a=dist/b") == ModelSource(Path("dist/b"), "a")
    assert ModelSource.of("dist/b") == ModelSource(Path("dist/b"))
    assert ModelSource.of("=x").name is None
    (tmp_path / "a=b").mkdir()
    assert ModelSource.of(f"{tmp_path}/a=b") == ModelSource(tmp_path / "a=b")
    assert ModelSource(tmp_path).all() == [ModelSource(tmp_path)]
    for name in ("one", "two"):
        (tmp_path / "dist" / name).mkdir(parents=True)
        (tmp_path / "dist" / name / "bundle.json").write_text("{}")
    expected = [ModelSource(tmp_path / "dist" / name) for name in ("one", "two")]
    assert ModelSource(tmp_path / "dist").all() == expected
    assert ModelSource(tmp_path / "dist", "x").all() == [ModelSource(tmp_path / "dist", "x")]


def test_a_model_that_cannot_be_loaded_keeps_no_memory(
    numpy_toy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list[weakref.ref[Executor]]()
    load = untrusted.load

    def watched(*arguments: Any, **options: Any) -> tuple[Executor, Tokenizer]:
        executor, tokenizer = load(*arguments, **options)
        loaded.append(weakref.ref(executor))
        return executor, tokenizer

    monkeypatch.setattr(untrusted, "load", watched)
    # The draft bundle is missing, which is found once the model is loaded.
    options = EngineOptions(speculate=Speculate(tmp_path / "missing"))
    sources = [ModelSource(numpy_toy_bundle, "a"), ModelSource(tmp_path / "other", "b")]
    models = Models(sources, LimitOverrides(), threads=1, options=options)
    with pytest.raises(RequestError, match=r"the model 'a' cannot be loaded: .*missing: does not exist"):
        models.use("a")
    assert str(models.entries[0].error).startswith(str(tmp_path / "missing"))
    gc.collect()
    assert [executor() for executor in loaded] == [None]
