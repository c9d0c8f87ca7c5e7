"""Tests of the step that assembles a bundle: tokenizer files, default sampling parameters, provenance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlcbuild.bundles import assemble
from mlcbuild.errors import CheckpointError
from tests.conftest import TINY


def tokenizer(directory: Path, **documents: object) -> Path:
    """Runs the tokenizer step on a copy of the embedded model, and returns the step's output directory.
    documents: name of a JSON file -> its new content, or None to remove the file."""
    checkpoint, out = directory / "checkpoint", directory / "out"
    shutil.copytree(TINY, checkpoint)
    out.mkdir()
    for name, document in documents.items():
        path = checkpoint / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        if document is None:
            path.unlink()
        else:
            path.write_text(document if isinstance(document, str) else json.dumps(document))
    assemble.tokenizer({}, {"checkpoint": checkpoint}, out)
    return out


def serving(out: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((out / assemble.SERVING).read_bytes())
    return document


def test_tokenizer_files_are_copied_not_linked(tmp_path: Path) -> None:
    out = tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        assert (out / name).read_bytes() == (TINY / name).read_bytes()
        assert (out / name).stat().st_nlink == 1, "the user may change the file in place"
    assert not (out / "model.safetensors").exists()


def test_serving_defaults_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 20}
    actual = serving(tokenizer(tmp_path, generation_config=generation))
    assert actual == {
        "eos_token_ids": [2, 3],
        "bos_token_id": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
    }


def test_config_json_speaks_where_generation_config_is_silent(tmp_path: Path) -> None:
    config = {**json.loads((TINY / "config.json").read_bytes()), "eos_token_id": 5, "bos_token_id": 4}
    actual = serving(tokenizer(tmp_path, generation_config=None, config=config))
    assert actual == {"eos_token_ids": [5], "bos_token_id": 4}


def test_a_greedy_checkpoint_serves_greedily(tmp_path: Path) -> None:
    generation = {"eos_token_id": 2, "do_sample": False, "temperature": 0.7}
    assert serving(tokenizer(tmp_path, generation_config=generation))["temperature"] == 0


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ({"generation_config": "{"}, "generation_config.json: is not valid JSON"),
        ({"generation_config": []}, "generation_config.json: must be a JSON object"),
    ],
)
def test_broken_documents(documents: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        tokenizer(tmp_path, **documents)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"embedding_dimension": 64, "pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"word_embedding_dimension": 64}, None),
    ],
)
def test_pooling_is_that_of_sentence_transformers(
    document: dict[str, object], expected: str | None, tmp_path: Path
) -> None:
    actual = serving(tokenizer(tmp_path, **{"1_Pooling/config": document}))
    assert actual.get("pooling") == expected
    assert "pooling" not in serving(tokenizer(tmp_path / "without"))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"pooling_mode_cls_token": True}, "1_Pooling/config.json: .*, not cls_token;"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, ".*, not last and mean;"),
        ([], "1_Pooling/config.json: must be a JSON object"),
    ],
)
def test_a_pooling_that_cannot_be(document: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        tokenizer(tmp_path, **{"1_Pooling/config": document})


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"neither tokenizer.json nor tokenizer.model"):
        assemble.tokenizer({}, {"checkpoint": tmp_path}, tmp_path)


def test_the_runtime_library_is_found_without_importing_the_compiler() -> None:
    actual = assemble.tvm_runtime()
    assert actual is not None
    assert actual.is_file()
    assert actual.name.startswith("libtvm_runtime.")
