"""Tests of emitting a finished bundle: which step's files, and what its provenance says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlcbuild import keyfile
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Source, Step
from mlcbuild.bundles import provenance
from mlcbuild.canon import Json, file_digest
from mlcbuild.emit import Finished, emit
from mlcbuild.errors import UsageError
from mlcbuild.pipeline import Pipeline, Product
from mlcbuild.store.store import Store


class Run:
    """A finished run of a small graph of steps in place of a real recipe's: a source, a config, a bundle, and
    the step that verifies the bundle. signer: the key that signs, or None."""

    def __init__(self, place: Path, signer: keyfile.Signer | None = None) -> None:
        (place / "model").mkdir()
        (place / "model" / "config.json").write_text("{}")
        (place / "recipe.yaml").write_text("name: x")
        files: dict[str, Json] = {"bundle.json": "{}", "weights.bin": "w"}
        graph = Graph([
            Source("source/m", place / "model", ("config.json",)),
            Step("fetch/m", "tests.actions:files", {"files": {"a.json": "1"}}, {}, memory=1),
            Step("config/m", "tests.actions:text", {"text": "c"}, {"of": Input("source/m")}, memory=1),
            Step("bundle/v", "tests.actions:files", {"files": files}, {"c": Input("config/m")}, memory=1),
            Step(
                "verify/v",
                "tests.actions:files",
                {"files": {"bundle.json": '{"kl": 1}'}},
                {"b": Input("bundle/v")},
                memory=1,
                tools={"torch": "9"},
            ),
        ])  # fmt: skip
        store = Store(place / "store")
        result = execute(graph, store, Options(executor="inline"), lambda _: None)
        records = {step.name: step.record for step in result.steps if step.record is not None}
        recipe = SimpleNamespace(name="x", path=place / "recipe.yaml")
        read = {"recipe": recipe, "recipe_digest": file_digest(recipe.path)}
        pipeline = cast(Pipeline, SimpleNamespace(**read, graph=graph))
        self.finished = Finished(pipeline, store, records, signer)
        self.output = place / "out"
        variant = SimpleNamespace(
            model=SimpleNamespace(name="m"),
            quantization="q",
            target=SimpleNamespace(name="t"),
            limits=SimpleNamespace(max_batch=4),
            output=self.output,
        )
        self.variant = cast(Any, variant)

    def product(self, *steps: str, verify: str | None = None) -> Product:
        return Product(self.variant, steps, "library/v", "bundle/v", verify)

    def statement(self) -> Any:
        return json.loads((self.output / provenance.STATEMENT).read_bytes())["predicate"]["buildDefinition"]


def test_the_manifest_is_that_of_the_verification(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert emit(run.finished, run.product("config/m", "bundle/v", "verify/v", verify="verify/v"))
    assert (run.output / "bundle.json").read_text() == '{"kl": 1}'
    assert (run.output / "weights.bin").read_text() == "w"
    assert not emit(run.finished, run.product("config/m", "bundle/v", "verify/v", verify="verify/v"))
    assert emit(run.finished, run.product("config/m", "bundle/v")), "another manifest replaces it"
    assert (run.output / "bundle.json").read_text() == "{}"


def test_provenance_names_the_recipe_that_was_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    digest = file_digest(tmp_path / "recipe.yaml")
    (tmp_path / "recipe.yaml").unlink()  # as a change of branches during a long run does
    assert emit(run.finished, run.product("config/m", "bundle/v"))
    assert run.statement()["externalParameters"]["recipe"] == {"name": "x", "blake3": digest}


def test_provenance_names_steps_sources_and_tools(tmp_path: Path) -> None:
    run = Run(tmp_path, keyfile.create(tmp_path / "key.pem"))
    emit(run.finished, run.product("config/m", "bundle/v", "verify/v", verify="verify/v"))
    build = run.statement()
    assert build["externalParameters"] == {
        "recipe": {"name": "x", "blake3": file_digest(tmp_path / "recipe.yaml")},
        "model": "m", "quantization": "q", "target": "t", "limits": {"max_batch": 4},
    }  # fmt: skip
    records = run.finished.records
    assert build["internalParameters"]["steps"] == {
        name: records[name].key for name in ("config/m", "bundle/v", "verify/v")
    }
    digest = file_digest(tmp_path / "model" / "config.json")
    config = {"name": "source/m/config.json", "digest": {"blake3": digest}}
    assert build["resolvedDependencies"] == [config]
    signer = run.finished.signer
    assert signer is not None
    assert provenance.check(run.output, [signer.public]).signers == (signer.public,)
    tools = json.loads((run.output / provenance.STATEMENT).read_bytes())["predicate"]["runDetails"]["builder"]
    assert tools["version"]["torch"] == "9" and tools["version"]["mlcbuild"] == run.finished.version


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.output.mkdir()
    (run.output / "letter.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"letter\.txt"):
        emit(run.finished, run.product("bundle/v"))
    assert (run.output / "letter.txt").read_text() == "mine"
