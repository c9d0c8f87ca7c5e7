"""Tests of which files a step reads for each kind of checkpoint, and which source files are in the step's
key."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.build.graph import Graph, Source, Step
from mlcbuild.build.plan import step_modules
from mlcbuild.canon import code_files
from mlcbuild.checkpoints.checkpoint_kinds import (
    GGUF,
    PYTORCH,
    SAFETENSORS,
    CheckpointKind,
    checkpoint_path,
    kind_of,
)
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import InputError
from mlcbuild.pipeline import build
from mlcbuild.recipe import load
from tests.conftest import ROOT, project
from tests.gguf_files import write_gguf

RECIPE = """\
version: 1
models: {plain: ./plain, packed: ./files/b.gguf}
quantizations: [q4f16_1]
targets: [x86-64-v3]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Writes a recipe in which the same model occurs as a safetensors checkpoint and as one of two GGUF files
    in a directory, writes these files, and returns the recipe's path."""
    path = project(tmp_path, RECIPE)
    (tmp_path / "plain").mkdir(exist_ok=True)
    golden = ROOT / "tests" / "golden" / "qwen3"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "plain" / name).write_bytes((golden / name).read_bytes())
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    (tmp_path / "files").mkdir()
    write_gguf(golden, tmp_path / "files" / "b.gguf")
    (tmp_path / "files" / "a.gguf").write_bytes(b"another model")
    return path


def step(graph: Graph, name: str) -> Step:
    node = next(node for node in graph.steps() if node.name.startswith(name))
    assert isinstance(node, Step)
    return node


def files(built_step: Step) -> set[str]:
    return {name for module in step_modules(built_step) for name in code_files(module) if "gguf" in name}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.safetensors.part", PYTORCH),
        ("adapter_model.safetensors", PYTORCH),
        ("model.safetensors.index.json", SAFETENSORS),
        ("other.safetensors", SAFETENSORS),
    ],
)
def test_files_beside_those_of_pytorch(name: str, kind: CheckpointKind, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / name).touch()
    assert kind_of(tmp_path) == kind


def test_steps_of_a_gguf_file(recipe: Path) -> None:
    graph = build(load(recipe), Lock({})).graph
    source = next(
        node for node in graph.nodes.values() if isinstance(node, Source) and node.name == "fetch/packed"
    )
    assert (source.root, source.files) == (recipe.parent / "files", ("b.gguf",))
    for name in ("config", "tokenizer", "weights", "reference"):
        packed = step(graph, f"{name}/packed")
        assert packed.params["file"] == "b.gguf"
        assert packed.inputs["checkpoint"].select == ("**/*.gguf",)
    # One architecture, one library.
    assert len([node for node in graph.steps() if node.name.startswith("library/")]) == 1


def test_keys_hold_the_code_of_their_own_kind(recipe: Path) -> None:
    graph = build(load(recipe), Lock({})).graph
    for name in ("config", "tokenizer", "weights", "reference", "library", "bundle"):
        assert not files(step(graph, f"{name}/plain" if name != "library" else name)), name
    reading = {"mlcbuild/checkpoints/gguf_file.py", "mlcbuild/checkpoints/gguf_tensors.py"}
    for name in ("weights", "reference"):
        sources = files(step(graph, f"{name}/packed"))
        assert reading <= sources
        assert not sources & {"mlcbuild/checkpoints/gguf_config.py", "mlcbuild/checkpoints/gguf_tokenizer.py"}
    assert "mlcbuild/checkpoints/gguf_config.py" in files(step(graph, "config/packed"))
    assert "mlcbuild/checkpoints/gguf_tokenizer.py" in files(step(graph, "tokenizer/packed"))


def test_kinds_by_path() -> None:
    assert kind_of(Path("a/model.gguf")) is GGUF
    assert kind_of(Path("a/model")) is SAFETENSORS
    assert checkpoint_path({}, {"checkpoint": Path("a")}) == Path("a")
    assert checkpoint_path({"file": "m.gguf"}, {"checkpoint": Path("a")}) == Path("a/m.gguf")


def test_a_damaged_file_is_reported_with_its_place_in_the_recipe(recipe: Path) -> None:
    path = recipe.parent / "files" / "b.gguf"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError) as caught:
        build(load(recipe), Lock({}))
    assert "2:34: model 'packed': " in str(caught.value) and "is damaged or incomplete" in str(caught.value)
