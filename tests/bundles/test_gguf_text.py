"""Tests that a GGUF file gives the same bundle as the checkpoint from which it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlcbuild_runtime.local import Engine

from mlcbuild import session
from tests.conftest import TINY
from tests.gguf_files import tiny_metadata, write_gguf

RECIPE = f"""\
version: 1
models: {{plain: {TINY}, packed: tiny.gguf}}
quantizations: [q4f16_1]
targets: [host]
compile: {{context_window: 512, prefill_chunk: 128, max_batch: 8}}
verify: {{prompts: ["add 1 and 2", "sort b a c"], max_kl: 0.1}}
"""


def answer(bundle: Path, question: str) -> str:
    with Engine(bundle) as engine:
        messages = [{"role": "user", "content": question}]
        reply: Any = engine.chat.completions.create(messages=messages, temperature=0, max_tokens=64)
        return str(reply.choices[0].message.content)


def test_a_gguf_file_gives_the_bundle_of_its_checkpoint(
    tmp_path: Path, tiny_bundles: Path, common_store: Path
) -> None:
    """Checks that the bundle of a GGUF file equals that of its checkpoint. The library comes from the store
    that the fixture `tiny_bundles` has filled."""
    write_gguf(TINY, tmp_path / "tiny.gguf", metadata=tiny_metadata(TINY))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    built = session.open(tmp_path / "recipe.yaml", store=common_store, allow_outside=True).run()
    built.check()
    plain, packed = (variant.bundle for variant in built.variants)
    assert plain is not None and packed is not None
    # One architecture: the library was compiled once.
    assert len([step for step in built.steps if step.name.startswith("library/")]) == 1
    for name in ("model.so", "weights-00001-of-00001.safetensors"):
        assert (plain / name).read_bytes() == (packed / name).read_bytes()
    question = json.loads((TINY / "heldout.jsonl").read_text().splitlines()[0])
    assert answer(packed, question["prompt"]) == answer(plain, question["prompt"])
