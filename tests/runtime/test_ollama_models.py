"""Tests of the descriptions of models in Ollama's form, loaded or not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlcbuild_format.bundle import File, Limits, Manifest, Memory, Model, Serving
from mlcbuild_runtime import locations
from mlcbuild_runtime.openai import ollama_models

MANIFEST = Manifest(
    name="a",
    model=Model("a", "toy", {"hidden_size": 64, "num_layers": 3}),
    scheme={"name": "q4"},
    target={"device": "cpu"},
    limits=Limits(context_window=128, prefill_chunk=16, max_batch=2, page_size=16),
    library="model.so",
    weights=(),
    signature="5" * 64,
    files={"tokenizer_config.json": File("0", 10), "model.so": File("0", 90)},
    memory=Memory(1, 1, 0, 2),
    serving=Serving(temperature=0.5, top_k=20),
)


def entry(path: Path, manifest: Manifest | None) -> Any:
    return SimpleNamespace(names=["a", "alias"], path=path, manifest=manifest)


def test_a_model_s_size_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").touch()
    tag: Any = ollama_models.tag(entry(tmp_path, MANIFEST))
    assert (tag["name"], tag["model"], tag["size"], tag["digest"]) == ("a", "a", 100, "5" * 64)
    assert tag["details"]["family"] == "toy" and tag["details"]["quantization_level"] == "q4"
    assert not tag["modified_at"].startswith("1970")


def test_a_bundle_that_cannot_be_read_is_listed_without_properties(tmp_path: Path) -> None:
    tag: Any = ollama_models.tag(entry(tmp_path / "gone", None))
    assert (tag["size"], tag["digest"], tag["details"]["family"]) == (0, "", "")
    assert tag["modified_at"].startswith("1970-01-01")


def test_what_a_model_can_do_follows_from_its_template(tmp_path: Path) -> None:
    def shown(template: str | None) -> Any:
        config = {} if template is None else {"chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return ollama_models.shown(entry(tmp_path, MANIFEST), MANIFEST)

    assert shown(None)["capabilities"] == ["completion", "embedding"]
    assert shown("{{ messages }}")["capabilities"] == ["completion", "embedding", "tools"]
    thinks = shown("{{ messages }}<think>")
    assert thinks["capabilities"][-1] == "thinking" and thinks["template"].endswith("<think>")
    assert thinks["parameters"] == "temperature 0.5\ntop_k 20"
    info = thinks["model_info"]
    assert (info["toy.context_length"], info["toy.embedding_length"]) == (128, 64)
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert ollama_models.shown(entry(tmp_path, MANIFEST), MANIFEST)["template"] == ""


def test_bundles_are_found_one_level_below(tmp_path: Path) -> None:
    for name in ("b", "a", "c/d", ".b.refused"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "bundle.json").touch()
    assert locations.directories(tmp_path) == (tmp_path / "a", tmp_path / "b")
    refused = tmp_path / ".b.refused"
    assert locations.directories(refused) == (refused,), "a user may still name it"
    assert locations.directories(tmp_path / "a") == (tmp_path / "a",)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "bundle.json").symlink_to("nowhere")
    assert locations.directories(tmp_path / "e") == (tmp_path / "e",), "a broken bundle is one, too"
