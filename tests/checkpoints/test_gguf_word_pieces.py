"""Tests of the WordPiece tokenizers of GGUF files: their parts, and a comparison with the BERT tokenizer from
which the metadata were written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_runtime.text.tokenizer import Tokenizer
from tokenizers import Tokenizer as Original
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mlcbuild.checkpoints.gguf_tokenizer import write_tokenizer
from mlcbuild.checkpoints.gguf_vocabulary import GgufVocabulary, MetadataReader
from mlcbuild.checkpoints.gguf_word_pieces import as_word_pieces, word_piece_parts
from mlcbuild.errors import CheckpointError
from tests.checkpoints.test_gguf_tokenizer import LINES, corpus

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROLES = dict(zip(("padding", "unknown", "cls", "seperator", "mask"), range(5), strict=True))
T = "tokenizer.ggml."
Metadata = dict[str, Any]


def bert(lowercase: bool, strips: bool | None = None) -> Original:
    """Returns a BERT tokenizer with a small vocabulary that is trained on random lines. It consists of the
    same parts as BertTokenizer in transformers. lowercase, strips: whether texts are lowercased, and lose
    their accents."""
    original = Original(models.WordPiece(unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    original.pre_tokenizer, original.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    names = [*SPECIAL, "[unused0]"]
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=names, show_progress=False)
    original.train_from_iterator(corpus(500), trainer)
    original.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    document = json.loads(original.to_str())
    document["added_tokens"] = document["added_tokens"][:-1]  # In BERT's vocabularies, "[unused0]" is a word.
    return Original.from_str(json.dumps(document))


def written(original: Original, old: bool) -> Metadata:
    """Returns the GGUF metadata that llama.cpp's converter writes for a BERT tokenizer. old: True for earlier
    converters, which leave the token "[unused0]" without a mark for the beginning of a word, and write
    neither token types nor ids of special tokens."""
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    for i, token in enumerate(tokens):
        if token in SPECIAL or (old and token == "[unused0]"):
            continue
        tokens[i] = token[2:] if token.startswith("##") else f"▁{token}"
    metadata: Metadata = {T + "model": "bert", T + "pre": "jina-v2-en", T + "tokens": tokens}
    if old:
        return metadata
    metadata |= {f"{T}{role}_token_id": token for role, token in ROLES.items()}
    return metadata | {T + "token_type": [3] * 5 + [1] * (len(tokens) - 5)}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("lowercase", "strips"), [(True, None), (False, None), (False, True)])
def test_ids_and_texts_equal_those_of_the_original(
    lowercase: bool, strips: bool | None, old: bool, tmp_path: Path
) -> None:
    original = bert(lowercase, strips)
    metadata = written(original, old)
    if not old:  # Old files leave it to the letters of the vocabulary.
        metadata[T + "normalizer.lowercase"] = lowercase
    if strips is not None:
        metadata[T + "normalizer.strip_accents"] = strips
    write_tokenizer(metadata, "m.gguf", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    texts = list(corpus(LINES // 2, tuple(SPECIAL[2:])))
    for text, encoding in zip(texts, original.encode_batch(texts), strict=True):
        assert tokenizer.vocabulary.encode(text, special=True) == encoding.ids, text
        assert tokenizer.decode(encoding.ids) == original.decode(encoding.ids), text
    assert tokenizer.bos == 2 and tokenizer.eos == {3}
    assert tokenizer.vocabulary.token_id("[unused0]") == original.token_to_id("[unused0]")


def test_a_long_word_is_unknown(tmp_path: Path) -> None:
    write_tokenizer(written(bert(True), old=False), "m.gguf", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a" * 101) == [2, 1, 3]
    assert len(tokenizer.encode("a" * 100)) > 3


SMALL: Metadata = {T + "model": "bert", T + "tokens": ["[UNK]", "[CLS]", "[SEP]", "▁a", "b", "▁b"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({T + "tokens": ["[CLS]", "[SEP]", "▁a"]}, "unknown_token_id: is absent, and WordPiece needs it"),
        ({T + "tokens": ["[UNK]", "[SEP]", "▁a"]}, "cls_token_id: is absent, and WordPiece needs it"),
        ({T + "tokens": ["[UNK]", "[CLS]", "▁a"]}, "seperator_token_id: is absent, and WordPiece needs it"),
        ({T + "cls_token_id": 6}, "cls_token_id: must be the id of one of the 6 tokens, not 6"),
        ({T + "normalizer.lowercase": 1}, "normalizer.lowercase: must be true or false, not 1"),
        ({T + "tokens": [*SMALL[T + "tokens"], "▁##b"]}, "tokens must differ when '▁' at their beginning"),
    ],
)
def test_wrong_metadata_are_refused(change: Metadata, message: str, tmp_path: Path) -> None:
    write_tokenizer(SMALL, "m.gguf", tmp_path)
    with pytest.raises(CheckpointError) as caught:
        write_tokenizer(SMALL | change, "m.gguf", tmp_path)
    assert f"m.gguf: {T}{message}" in str(caught.value).replace(f"{T}tokens: tokens", f"{T}tokens")


NORMAL, CONTROL, UNUSED = 1, 3, 5


def vocabulary(*tokens: str, **flags: bool) -> GgufVocabulary:
    """Returns a WordPiece vocabulary as read from a GGUF file, whose tokens all have the type "normal" and no
    roles such as BOS. flags: boolean metadata, with "normalizer_" in place of "normalizer."."""
    named = {name.replace("normalizer_", "normalizer."): value for name, value in flags.items()}
    return GgufVocabulary("bert", list(tokens), [NORMAL] * len(tokens), [], [], "", {}, named, b"")


def test_texts_are_those_of_bert() -> None:
    reader = MetadataReader({})
    actual = as_word_pieces(
        vocabulary("[UNK]", "[CLS]", "[SEP]", "▁", "▁the", "s", "[", "[x]", "[y]", "▁[y]"), reader
    )
    # A bracketed name is a piece of a word only if the whole word is in the vocabulary, too.
    assert actual.tokens == ["[UNK]", "[CLS]", "[SEP]", "##▁", "the", "##s", "##[", "[x]", "##[y]", "[y]"]
    assert actual.types == [CONTROL] * 3 + [NORMAL] * 7
    assert actual.ids == {"unk": 0, "cls": 1, "sep": 2, "bos": 1, "eos": 2} and not reader.problems


def test_stated_roles_precede_names() -> None:
    before = vocabulary("[UNK]", "[CLS]", "[SEP]", "▁a", "▁b")
    stated = replace(before, ids={"cls": 3, "eos": 4})
    actual = as_word_pieces(stated, MetadataReader({}))
    assert actual.ids == {"unk": 0, "cls": 3, "sep": 2, "bos": 3, "eos": 4}
    assert actual.types == [CONTROL, NORMAL, CONTROL, CONTROL, CONTROL], "each role is special"
    assert before.ids == {}, "the vocabulary of the file stays unchanged"


def tokens_of(read: GgufVocabulary, text: str) -> list[str]:
    """Returns the tokens into which the package tokenizers splits a text, with the tokenizer.json that is
    written for a WordPiece vocabulary from a GGUF file."""
    parts = word_piece_parts(as_word_pieces(read, MetadataReader({})))
    document = {"version": "1.0", "added_tokens": [], "truncation": None, "padding": None, **parts}
    tokens: list[str] = Original.from_str(json.dumps(document)).encode(text).tokens
    return tokens


@pytest.mark.parametrize(
    ("flags", "words", "tokens"),
    [
        ({}, ("▁a", "b", "▁é"), ["a", "##b", "[UNK]"]),
        ({"normalizer_strip_accents": False}, ("▁a", "b", "▁é"), ["a", "##b", "é"]),
        ({}, ("▁a", "▁A", "b"), ["A", "##b", "[UNK]"]),
        ({"normalizer_lowercase": True}, ("▁a", "▁A", "b", "▁e"), ["a", "##b", "e"]),
        ({"normalizer_lowercase": False}, ("▁a", "b", "▁é"), ["[UNK]", "é"]),
    ],
)
def test_a_vocabulary_without_capitals_is_lowercased_unless_the_file_states_it(
    flags: dict[str, bool], words: tuple[str, ...], tokens: list[str]
) -> None:
    read = vocabulary("[UNK]", "[CLS]", "[SEP]", *words, **flags)
    assert tokens_of(read, "Ab é") == ["[CLS]", *tokens, "[SEP]"]


def test_unused_tokens_have_no_text() -> None:
    read = vocabulary("[UNK]", "[CLS]", "[SEP]", "a", "▁b")
    read.types[3] = UNUSED
    assert tokens_of(read, "a b") == ["[CLS]", "[UNK]", "b", "[SEP]"]
