"""Tests of the tokenizer.model that is written for a GGUF file: its pieces, and tokenizers that change the
text or remove white space around tokens."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format.errors import BundleError
from mlcbuild_runtime.text.tokenizer import Tokenizer
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from mlcbuild.checkpoints.gguf_pieces import split_tokens, tokenizer_model
from mlcbuild.checkpoints.gguf_tokenizer import write_tokenizer
from mlcbuild.checkpoints.gguf_vocabulary import GgufVocabulary, MetadataReader
from mlcbuild.errors import CheckpointError
from tests.checkpoints.test_gguf_tokenizer import LINES, corpus, pieces_metadata

T = "tokenizer.ggml."
PHI3 = ("<|assistant|>", "<|end|>", "<|placeholder1|>", "<|user|>", "<|endoftext|>")


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
    """Checks GGUF files with a randomly damaged table of text normalization (precompiled_charsmap): reading
    the tokenizer fails with an error message, or it encodes every text without a crash."""
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


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KINDS = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<t>": USER_DEFINED, "x": UNUSED}


def small(model: str = "llama", more: tuple[str, ...] = (), **flags: bool) -> GgufVocabulary:
    """Returns a vocabulary of a few letters, in which "ab" has a higher score than "bc". more: further
    tokens, which are user-defined."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "c", "ab", "bc", "<t>", "x", *more]
    types = [KINDS.get(token, USER_DEFINED if token in more else NORMAL) for token in tokens]
    scores = [-0.5 * i for i in range(len(tokens))]
    ids = {"unk": 0, "bos": 1, "eos": 2}
    return GgufVocabulary(model, tokens, types, scores, [], "", ids, flags, b"")


def pieces_of(vocabulary: GgufVocabulary) -> SentencePieceProcessor:
    """Returns a SentencePiece tokenizer that is loaded from the tokenizer.model written for `vocabulary`, the
    vocabulary of a GGUF file. Fails if writing it reports a problem."""
    reader = MetadataReader({})
    data = tokenizer_model(vocabulary, reader)
    assert not reader.problems
    return SentencePieceProcessor(model_proto=data)


def test_pieces_have_the_texts_scores_and_kinds_of_the_vocabulary() -> None:
    vocabulary = small()
    pieces = pieces_of(vocabulary)
    size = range(pieces.get_piece_size())
    assert [pieces.id_to_piece(i) for i in size] == vocabulary.tokens
    assert [pieces.get_score(i) for i in size] == vocabulary.scores
    assert [i for i in size if pieces.is_control(i)] == [1, 2]
    assert [i for i in size if pieces.is_unknown(i)] == [0] and [i for i in size if pieces.is_unused(i)] == [
        10
    ]
    assert (pieces.unk_id(), pieces.bos_id(), pieces.eos_id(), pieces.pad_id()) == (0, 1, 2, -1)


@pytest.mark.parametrize(
    ("model", "flags", "text", "tokens"),
    [
        ("llama", {}, "abc", ["\u2581", "ab", "c"]),
        ("llama", {"add_space_prefix": False}, "abc", ["ab", "c"]),
        ("llama", {}, "a  b ", ["\u2581", "a", "\u2581", "\u2581", "b", "\u2581"]),
        ("llama", {"remove_extra_whitespaces": True}, "a  b", ["\u2581", "a", "\u2581", "\u2581", "b"]),
        ("t5", {"remove_extra_whitespaces": True}, "a  b ", ["\u2581", "a", "\u2581", "b"]),
        # The scores of "a" and "bc" add up to -6.0, those of "ab" and "c" to -6.5: BPE does not add them.
        ("t5", {"add_space_prefix": False}, "abc", ["a", "bc"]),
    ],
)
def test_sentencepiece_divides_text_by_the_model(
    model: str, flags: dict[str, Any], text: str, tokens: list[str]
) -> None:
    assert pieces_of(small(model, **flags)).encode(text, out_type=str) == tokens


def test_spaces_of_user_defined_tokens_are_those_of_sentencepiece() -> None:
    pieces = pieces_of(small(more=("a b", "b c", "b\u2581c")))
    assert [pieces.id_to_piece(i) for i in (11, 12, 13)] == ["a\u2581b", "b c", "b\u2581c"]


def test_other_unknown_tokens_become_control_tokens() -> None:
    vocabulary = small()
    vocabulary.types[4] = UNKNOWN
    assert pieces_of(vocabulary).is_control(4)


BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def typed(vocabulary: GgufVocabulary, kind: int, *names: str) -> GgufVocabulary:
    """Changes the type of the tokens `names` in a vocabulary to `kind`, a number of GGUF's token_type, and
    returns the same vocabulary."""
    for i, token in enumerate(vocabulary.tokens):
        if token in names:
            vocabulary.types[i] = kind
    return vocabulary


def test_bytes_stand_for_unknown_characters() -> None:
    pieces = pieces_of(typed(small(more=BYTES), BYTE, *BYTES))
    assert pieces.encode("\u00e9", out_type=str) == ["\u2581", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (typed(small(more=BYTES[:-1]), BYTE, *BYTES), "must be all of <0x00> to <0xFF>, but 1 are missing"),
        (typed(small(), BYTE, "x"), "but 257 are missing or have other names, '<0x00>' for one"),
        (small(more=("a\0b",)), "tokens: entry 11 is 'a\\x00b', with NUL in it"),
    ],
)
def test_what_sentencepiece_would_refuse_is_a_problem(vocabulary: GgufVocabulary, message: str) -> None:
    reader = MetadataReader({})
    tokenizer_model(vocabulary, reader)
    (problem,) = reader.problems
    assert message in problem


def test_a_vocabulary_without_unknown_token_is_a_problem() -> None:
    vocabulary, reader = small(), MetadataReader({})
    tokenizer_model(replace(vocabulary, ids={}), reader)
    assert [problem.partition(";")[0] for problem in reader.problems] == [
        f"{T}token_type: exactly one token must be unknown (2), and none is"
    ]


@pytest.mark.parametrize(
    ("units", "texts", "is_sound"), [(256, b"\0", True), (255, b"\0", False), (256, b"a", False)]
)
def test_a_table_may_not_point_beyond_its_trie(units: int, texts: bytes, is_sound: bool) -> None:
    """Checks tables of text normalization (precompiled_charsmap) in GGUF files, whose first part is a trie of
    4-byte units. A unit of zeros refers to places among the first 256 units, so a table with fewer units is
    refused, and so is one whose texts do not end with a zero byte."""
    reader = MetadataReader({})
    table = (4 * units).to_bytes(4, "little") + bytes(4 * units) + texts
    tokenizer_model(replace(small("t5"), normalization=table), reader)
    assert (not reader.problems) == is_sound


def test_user_defined_tokens_are_split_off_before_the_space() -> None:
    vocabulary = small(more=("two words", " ", "\u2581a"))
    entries = {9: {"content": "<t>", "special": False}, 11: {"content": "two words", "special": False}}
    assert split_tokens(vocabulary) == entries
    assert split_tokens(replace(vocabulary, flags={"add_space_prefix": False})) == {}
