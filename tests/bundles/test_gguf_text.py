"""Tests that a GGUF file gives the same bundle as the checkpoint from which it was written, and of the step
that extracts its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from mlcbuild_runtime.local import Engine
from mlcbuild_runtime.text.tokenizer import Tokenizer

from mlcbuild import session
from mlcbuild.bundles import gguf_text
from mlcbuild.bundles.assemble import SERVING
from mlcbuild.errors import CheckpointError
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
    """Builds the embedded model from its checkpoint and from a GGUF file with the same values. Checks that
    both bundles have the same library and weights, and that the library, which other tests have built before,
    is compiled only once."""
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


def write(path: Path, model: str) -> None:
    """Writes a GGUF file with a vocabulary of four tokens and no tensors."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "<e>"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_chat_template("{{ messages[0].content }}<e>")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_step_extracts_the_tokenizer_of_one_file(tmp_path: Path) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    checkpoint.mkdir()
    out.mkdir()
    write(checkpoint / "one.gguf", "gpt2")
    write(checkpoint / "two.gguf", "rwkv")
    gguf_text.tokenizer({"file": "one.gguf"}, {"checkpoint": checkpoint}, out)
    tokenizer = Tokenizer.load(out)
    assert tokenizer.encode("bab<e>") == [1, 2, 3]
    assert tokenizer.chat([{"role": "user", "content": "b"}]) == [1, 3]
    serving = json.loads((out / SERVING).read_text(encoding="utf-8"))
    assert serving == {"eos_token_ids": [3]}
    message = f"{checkpoint / 'two.gguf'}: tokenizer.ggml.model: 'rwkv' is not supported"
    with pytest.raises(CheckpointError, match=message):
        gguf_text.tokenizer({"file": "two.gguf"}, {"checkpoint": checkpoint}, out)
