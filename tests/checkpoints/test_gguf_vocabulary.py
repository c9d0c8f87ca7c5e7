"""Tests of reading a vocabulary from GGUF metadata: its checks, and what files leave out."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from mlcbuild.checkpoints import gguf_vocabulary
from mlcbuild.checkpoints.gguf_vocabulary import (
    BYTE,
    CONTROL,
    CONVERT,
    FLAGS,
    IDS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GgufVocabulary,
    MetadataReader,
    check_name,
    read_vocabulary,
    shown,
)

T = "tokenizer.ggml."
GPT2: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["a", "b", "ab", "abb", "<e>", "u"],
    "token_type": [NORMAL, 0, NORMAL, NORMAL, NORMAL, UNUSED],
    "merges": ["a b", "ab b", "a b"],
    "eos_token_id": 4,
    "cls_token_id": 99,
}
LLAMA: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "<0x0A>", "<0x0a>", "a"],
    "scores": [0, 0.0, 0.0, -1.5, -2],
    "token_type": [UNKNOWN, NORMAL, BYTE, NORMAL, USER_DEFINED],
    "bos_token_id": 1,
}


def reader(**metadata: Any) -> MetadataReader:
    return MetadataReader({T + name.replace("__", "."): value for name, value in metadata.items()})


def vocabulary(**metadata: Any) -> GgufVocabulary:
    own = reader(**metadata)
    actual = read_vocabulary(own)
    assert actual is not None, own.problems
    return actual


def test_names_and_numbers_are_those_of_the_package_gguf() -> None:
    types = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
    names = ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")
    assert types == tuple(gguf.TokenType[name] for name in names)
    keys = {value for name, value in vars(gguf.Keys.Tokenizer).items() if name.isupper()}
    assert {T + key for role, key in IDS.items() if role != "cls"} <= keys, "gguf no longer writes CLS"
    assert {T + name for name in FLAGS if "normalizer" not in name} <= keys


def test_byte_level_bpe_has_merges() -> None:
    actual = vocabulary(**GPT2)
    assert actual.tokens == GPT2["tokens"]
    # The end-of-sequence token must never be text, and 0 is an old name of a normal token.
    assert actual.types == [NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, UNUSED]
    assert actual.merges == [("a", "b"), ("ab", "b")], "each pair once"
    assert (actual.ids, actual.pre_tokenizer) == ({"eos": 4}, "gpt-2"), "CLS is for WordPiece only"
    assert (actual.scores, actual.flags, actual.normalization) == ([], {}, b"")


def test_pieces_have_scores_and_an_unknown_token() -> None:
    actual = vocabulary(**LLAMA, add_bos_token=False, add_space_prefix=np.bool_(True))
    assert actual.scores == [0.0, 0.0, 0.0, -1.5, -2.0] and all(
        type(score) is float for score in actual.scores
    )
    assert actual.types == [UNKNOWN, CONTROL, BYTE, NORMAL, USER_DEFINED]
    assert actual.ids == {"bos": 1, "unk": 0}
    assert actual.flags == {"add_bos_token": False, "add_space_prefix": True}
    assert (actual.merges, actual.pre_tokenizer) == ([], "")


def test_an_id_of_no_token_is_left_out() -> None:
    """Checks ids as in llama.cpp's stories15M-q4_0.gguf, which was converted from llama2.c."""
    absent = np.uint32(0xFFFFFFFF)
    assert vocabulary(**LLAMA, seperator_token_id=absent, padding_token_id=absent) == vocabulary(**LLAMA)


def test_types_that_a_file_leaves_out_follow_from_names() -> None:
    untyped = {name: value for name, value in LLAMA.items() if name != "token_type"}
    assert vocabulary(**untyped).types == [NORMAL, CONTROL, BYTE, NORMAL, NORMAL]
    words = {"model": "bert", "tokens": ["<0x0A>", "[CLS]"], "cls_token_id": 1, "mask_token_id": np.uint32(0)}
    actual = vocabulary(**words)
    assert (actual.types, actual.ids) == ([NORMAL, NORMAL], {"cls": 1, "mask": 0})


def test_an_empty_token_gets_the_name_that_llama_cpp_gives_it() -> None:
    assert vocabulary(**{**LLAMA, "tokens": ["<unk>", "", "x", "y", "z"]}).tokens[1] == "[EMPTY_1]"


def test_a_table_of_characters_is_bytes_with_or_without_sign() -> None:
    unigram = {**LLAMA, "model": "t5"}
    assert vocabulary(**unigram, precompiled_charsmap=[0, 127, -128, -1, 255]).normalization == bytes(
        (0, 127, 128, 255, 255)
    )
    table = np.array([-1, 1], np.int8)
    assert vocabulary(**unigram, precompiled_charsmap=table).normalization == b"\xff\x01"
    assert vocabulary(**LLAMA, precompiled_charsmap="x").normalization == b"", "it is read for unigrams only"


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({**GPT2, "model": "rwkv"}, "model: 'rwkv' is not supported; supported: gpt2, llama, t5, bert"),
    "no model": ({"tokens": ["a"]}, "model: is absent; supported:"),
    "model type": ({**GPT2, "model": 5}, "model: must be a string, not 5"),
    "no tokens": ({**GPT2, "tokens": []}, "tokens: is absent or empty"),
    "same tokens": ({**LLAMA, "tokens": [*"abbbc"]}, "tokens: tokens must differ, but 'b' stands 3 times"),
    "token type": ({**LLAMA, "tokens": [*"abcd", 5]}, "tokens: entries must be str, but entry 4 is 5"),
    "surrogate": ({**LLAMA, "tokens": [*"abcd", "\ud800"]}, "tokens: entries must be UTF-8, but entry 4 has"),
    "id": ({**LLAMA, "eos_token_id": 5}, "eos_token_id: must be the id of one of the 5 tokens, not 5"),
    "negative id": ({**LLAMA, "eos_token_id": -1}, "eos_token_id: must be the id of one of the 5 tokens"),
    "id type": ({**LLAMA, "eos_token_id": True}, "eos_token_id: must be an integer, not True"),
    "flag": ({**LLAMA, "add_bos_token": 1}, "add_bos_token: must be true or false, not 1"),
    "flag without id": ({**LLAMA, "add_eos_token": True}, f"add_eos_token: needs {T}eos_token_id, which is"),
    "type": ({**LLAMA, "token_type": [1, 1, 1, 7, 1]}, "token_type: types are 0 to 6, but entry 3 is 7"),
    "types": (
        {**LLAMA, "token_type": [1]},
        "token_type: must have an entry for each of the 5 tokens, but has",
    ),
    "no scores": ({**LLAMA, "scores": None}, "scores: is absent, and SentencePiece needs it"),
    "scores": (
        {**LLAMA, "scores": [0.0] * 4},
        "scores: must have an entry for each of the 5 tokens, but has 4",
    ),
    "NaN": (
        {**LLAMA, "scores": [0, 0, float("nan"), 0, 0]},
        "scores: entries must be finite, but entry 2 is",
    ),
    "large": (
        {**LLAMA, "scores": [0, 0, 0, 1e39, 0]},
        "scores: entries must be finite, but entry 3 is 1e+39",
    ),
    "no merges": ({**GPT2, "merges": None}, "merges: is absent, and byte-level BPE needs it"),
    "merge": ({**GPT2, "merges": ["a b", "b a"]}, "merges: entries must be two tokens with a space between"),
    "unused": (
        {**GPT2, "tokens": ["a", "b", "ab", "abb", "<e>", "aa"], "merges": ["a a"]},
        "merges: entries",
    ),
    "byte": (
        {**LLAMA, "model": "t5", "precompiled_charsmap": [256]},
        "precompiled_charsmap: entries must be b",
    ),
    "no array": ({**LLAMA, "scores": 5}, "scores: must be an array, not 5"),
    "matrix": ({**LLAMA, "scores": np.zeros((5, 1))}, "scores: must be an array, not array([["),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_problem_with_its_key_and_a_remedy(name: str) -> None:
    metadata, message = FAULTS[name]
    own = reader(**metadata)
    assert read_vocabulary(own) is None
    (problem,) = own.problems
    assert problem.startswith(T + message) and "\n" not in problem
    assert problem.endswith(("or use another file", "use the model's original checkpoint instead"))


def test_all_faults_of_a_vocabulary_come_at_once() -> None:
    own = reader(**{**LLAMA, "eos_token_id": 9, "add_bos_token": 1, "scores": None, "token_type": [1]})
    assert read_vocabulary(own) is None
    keys = [problem.partition(":")[0].removeprefix(T) for problem in own.problems]
    assert keys == ["eos_token_id", "add_bos_token", "token_type", "scores"]


def test_arrays_are_limited_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_vocabulary, "LARGEST_VOCABULARY", 4)
    own = reader(**LLAMA)
    assert read_vocabulary(own) is None
    assert own.problems == [f"{T}tokens: has 5 entries, and at most 4 are read; {CONVERT}"]


def test_a_text_with_broken_characters_is_refused() -> None:
    own = MetadataReader({"a": "x\udcff", "b\udcff": "x", "c": "é"})
    assert [own.text(key) for key in ("a", "b\udcff", "c", "d")] == [None, None, "é", None]
    assert len(own.problems) == 2 and all("must be UTF-8" in problem for problem in own.problems)


def test_an_unknown_name_has_a_suggestion() -> None:
    own = reader()
    assert check_name(own, "key", "gpt-2", ["gpt-2", "llama-bpe"]) and not own.problems
    assert not check_name(own, "key", "gtp-2", ["gpt-2", "llama-bpe"])
    assert not check_name(own, "key", "", ["gpt-2"])
    first, second = own.problems
    assert first.startswith("key: 'gtp-2' is unknown; did you mean 'gpt-2'?")
    assert second.startswith("key: is absent; use the model's original checkpoint, or")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\n", r"'a\n'"),
        ("x" * 99, repr("x" * 60)),
        ([1, 2], "an array of 2"),
        (np.zeros(3), "an array of 3"),
        (b"\xff\xff", "2 bytes that are not UTF-8"),
        (1 << 65, "an integer of more than 64 bits"),
        (None, "None"),
    ],
)
def test_a_value_is_shown_in_a_few_characters(value: object, text: str) -> None:
    assert shown(value) == text
