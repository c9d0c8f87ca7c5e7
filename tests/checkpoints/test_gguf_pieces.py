"""SentencePiece tokenizers of GGUF files that change the text or remove white space around tokens."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format.errors import BundleError
from mlcbuild_runtime.text.tokenizer import Tokenizer
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from mlcbuild.checkpoints.gguf_tokenizer import write_tokenizer
from mlcbuild.errors import CheckpointError
from tests.checkpoints.test_gguf_tokenizer import LINES, corpus, pieces_metadata

T = "tokenizer.ggml."
PHI3 = ("<|assistant|>", "<|end|>", "<|placeholder1|>", "<|user|>", "<|endoftext|>")
CONTROL = 3


def trained(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(line.replace("\n", " ") for line in corpus(500)),
        model_writer=buffer,
        model_type=kind,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    return buffer.getvalue()


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (field number, content) of the messages and strings in a Protocol Buffers message."""

    def varint() -> int:
        nonlocal data
        value = shift = 0
        while True:
            byte, data = data[0], data[1:]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while data:
        field, kind = divmod(varint(), 8)
        if kind == 2:
            size = varint()
            yield field, data[:size]
            data = data[size:]
        elif kind == 0:
            varint()
        else:
            data = data[4:]


@pytest.fixture(scope="module")
def normalizing() -> bytes:
    """Returns a unigram model that normalizes text (NFKC) and collapses spaces, as T5's and XLM-R's do."""
    return trained("unigram", vocab_size=700, hard_vocab_limit=False)


def written(model: bytes) -> dict[str, Any]:
    (normalizer,) = (content for field, content in messages(model) if field == 3)
    (table,) = (content for field, content in messages(normalizer) if field == 2)
    metadata = pieces_metadata(model, "t5")
    return {**metadata, T + "precompiled_charsmap": [*table], T + "remove_extra_whitespaces": True}


def test_text_is_normalized_as_by_the_original(normalizing: bytes, tmp_path: Path) -> None:
    write_tokenizer(written(normalizing), "m.gguf", tmp_path)
    original, tokenizer = SentencePieceProcessor(model_proto=normalizing), Tokenizer.load(tmp_path)
    texts = list(corpus(LINES // 2))
    for text, ids in zip(texts, original.encode(texts), strict=True):
        assert tokenizer.vocabulary.encode(text, special=False) == ids, text


def test_tables_that_point_beyond_their_end_are_refused(normalizing: bytes, tmp_path: Path) -> None:
    """Checks damaged tables: they are refused, or each text is read without a crash."""
    metadata, rng, refused = written(normalizing), random.Random(4), 0
    table = metadata[T + "precompiled_charsmap"]
    texts = list(corpus(200))
    for _ in range(30):
        damaged = list(table)
        for _ in range(rng.choice((1, 20, 3000))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.2:
            damaged = damaged[: rng.randrange(len(damaged))]
        try:
            write_tokenizer({**metadata, T + "precompiled_charsmap": damaged}, "m.gguf", tmp_path)
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith(f"m.gguf: {T}precompiled_charsmap: is damaged: it points beyond its")
            continue
        try:
            tokenizer = Tokenizer.load(tmp_path)
        except BundleError as error:  # Newer versions of SentencePiece check more.
            assert "precompiled_charsmap is invalid" in str(error)
            continue
        for text in texts:
            tokenizer.vocabulary.encode(text, special=False)
    assert 0 < refused < 30


def test_special_tokens_of_phi_3_remove_white_space_after_them(tmp_path: Path) -> None:
    model = trained("bpe", vocab_size=800, byte_fallback=True, normalization_rule_name="identity",
                    remove_extra_whitespaces=False, control_symbols=list(PHI3))  # fmt: skip
    metadata: dict[str, Any] = pieces_metadata(model, "llama")
    write_tokenizer(metadata, "m.gguf", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)

    def encode(text: str) -> list[int]:
        return tokenizer.vocabulary.encode(text, special=False)

    user, end, last = (tokenizer.vocabulary.token_id(name) for name in ("<|user|>", "<|end|>", PHI3[-1]))
    assert encode("<|user|>\n the<|end|> \t\n") == [user, *encode("the"), end]
    assert encode("<|endoftext|>\nthe") == [last, *encode("\nthe")] != [last, *encode("the")]
    # Without one of the names it is another vocabulary, which keeps white space.
    metadata[T + "tokens"] = [
        "<|other|>" if name == "<|placeholder1|>" else name for name in metadata[T + "tokens"]
    ]
    write_tokenizer(metadata, "m.gguf", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert encode("<|user|>\nthe") == [user, *encode("\nthe")]
