"""Tests that tensors for vision, audio and draft tokens are left out of a text model, and that a run reports
their names and number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlcbuild import session
from mlcbuild.build.events import Event, Noted
from mlcbuild.checkpoints import exact_weights
from mlcbuild.errors import CheckpointError
from mlcbuild.models import parameters, parsing
from mlcbuild.session import Execution, Selection
from tests import experts_golden
from tests.checkpoint_files import entry, save
from tests.conftest import TINY

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
RECIPE = """\
version: 1
models: {small: ./small}
quantizations: [q8f16_1]
targets: [x86-64-v3]
"""
SURPLUS = {
    "model.audio_tower.layers.0.fc1.weight": "audio_tower takes no part in text",
    "model.audio_tower.layers.1.fc1.weight": "audio_tower takes no part in text",
    "mtp.layers.0.eh_proj.weight": "mtp takes no part in text",
    "model.layers.3.eh_proj.weight": "models of family 'glm4_moe' do not read it",
}


def write(area: Path, config: object, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a checkpoint with two safetensors files, their index, `config` as config.json and a tokenizer to
    the new directory `area`, and returns it. tensors: name -> values, stored as float32."""
    area.mkdir()
    (area / "config.json").write_text(json.dumps(config))
    names, places = sorted(tensors), dict[str, str]()
    for part, part_names in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{part:05}-of-00002.safetensors"
        save(area / file, {name: entry(tensors[name], "F32") for name in part_names})
        places |= dict.fromkeys(part_names, file)
    (area / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, area)
    return area


def notes(area: Path) -> list[str]:
    """Writes a recipe for the checkpoint in the directory `small` of `area`, executes the steps that convert
    its weights, and returns the texts of the notes that the run reports."""
    recipe, events = area / "recipe.yaml", list[Event]()
    recipe.write_text(RECIPE)
    opened = session.open(recipe, store=area / "store")
    names = [step.name for step in opened.plan().steps if step.name.startswith("weights/")]
    result = opened.run(Selection(tuple(names)), Execution(executor="inline"), on_event=events.append)
    assert result.run.ok, [step.error for step in result.run.steps]
    return [event.message for event in events if isinstance(event, Noted)]


def test_a_run_says_what_of_audio_and_drafts_it_leaves_out(tmp_path: Path) -> None:
    golden = experts_golden.golden("glm4_moe")
    assert len(golden.config.layers) == 3
    more = {name: np.ones((3, 5), np.float32) for name in SURPLUS}
    write(tmp_path / "small", golden.values, {**golden.tensors, **more})
    assert sorted(note.partition(": ")[2] for note in notes(tmp_path)) == [
        "left out 2 tensors, such as model.audio_tower.layers.0.fc1.weight: audio_tower takes no part in"
        " text",
        "left out model.layers.3.eh_proj.weight: models of family 'glm4_moe' do not read it",
        "left out mtp.layers.0.eh_proj.weight: mtp takes no part in text",
    ]
    names = parsing.tensor_names(golden.config)
    assert exact_weights.checkpoint(tmp_path / "small", golden.config, names).keys() == {
        param.name for param in parameters(golden.config)
    }


@pytest.mark.parametrize("name", ["model.speech.weight", "model.layers.4.eh_proj.weight"])
def test_a_tensor_that_nobody_knows_is_no_surplus(name: str, tmp_path: Path) -> None:
    golden = experts_golden.golden("glm4_moe")
    area = write(tmp_path / "small", golden.values, {**golden.tensors, name: np.ones((3, 5), np.float32)})
    with pytest.raises(CheckpointError, match=f"tensor '{name}' belongs to no parameter"):
        exact_weights.checkpoint(area, golden.config, parsing.tensor_names(golden.config))


def test_embedding_models_have_names_without_prefix(tmp_path: Path) -> None:
    """Checks a checkpoint like that of Qwen3-Embedding, which has no output head and whose tensor names lack
    the prefix `model.`."""
    values = json.loads((GOLDEN / "config.json").read_text()) | {"tie_word_embeddings": True}
    config = parsing.parse(values)
    usual = load_file(GOLDEN / "model.safetensors")
    usual.pop("lm_head.weight", None)
    short = {name.removeprefix("model."): tensors for name, tensors in usual.items()}
    assert "embed_tokens.weight" in short
    names = parsing.tensor_names(config)
    first, second = (
        exact_weights.checkpoint(write(tmp_path / kind, values, tensors), config, names)
        for kind, tensors in (("usual", usual), ("short", short))
    )
    for param in parameters(config):
        assert np.array_equal(first[param.name], second[param.name])


def test_the_error_for_a_missing_head_names_the_remedy(tmp_path: Path) -> None:
    values = json.loads((GOLDEN / "config.json").read_text()) | {"tie_word_embeddings": False}
    stored = {
        name: tensors
        for name, tensors in load_file(GOLDEN / "model.safetensors").items()
        if "lm_head" not in name
    }
    area, config = write(tmp_path / "small", values, stored), parsing.parse(values)
    with pytest.raises(CheckpointError) as caught:
        exact_weights.checkpoint(area, config, parsing.tensor_names(config))
    (line,) = str(caught.value).splitlines()
    assert "'lm_head.weight' is missing" in line and "set tie_word_embeddings to true" in line
