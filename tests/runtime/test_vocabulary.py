"""Tests of vocabularies of both kinds of files: tokens are bytes, names and numbers that lead back to each
other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format.errors import BundleError
from mlcbuild_runtime.text.vocabulary import MOST_GROWTH, JsonVocabulary, PieceVocabulary, Vocabulary

from . import shared

TINY = shared.ROOT / "recipes" / "models" / "tiny"
CONFIG: dict[str, Any] = {
    "added_tokens_decoder": {
        "900": {"content": "<user>", "special": True},
        "901": {"content": "<tool>", "special": False},
        "no number": {"content": "x"},
        "902": ["no", "object"],
    },
    "additional_special_tokens": [{"content": "<user>"}, "</s>", 5],
    "add_eos_token": True,
}


@pytest.fixture(scope="module", params=["json", "pieces"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    if request.param == "json":
        return JsonVocabulary(TINY / "tokenizer.json")
    return PieceVocabulary(TINY / "tokenizer.model", {}, {"bos_token": "<s>"})


@pytest.mark.parametrize("text", ["once upon a time", "Zürich 日本 🙂\n\t", "a  b", "<0x41>"])
def test_the_bytes_of_a_text_s_tokens_are_the_text(vocabulary: Vocabulary, text: str) -> None:
    data = b"".join(vocabulary.token_bytes(token) for token in vocabulary.encode(text, special=False))
    assert data.decode().removeprefix(" " if vocabulary.leading_space else "") == text


def test_names_and_numbers_lead_back_to_each_other(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.encode("once upon <a> 🙂", special=True)
    assert [vocabulary.token_id(vocabulary.token_name(token)) for token in tokens] == tokens
    assert tokens[0] == vocabulary.token_id("<s>") and vocabulary.token_bytes(tokens[0]) == b""
    assert vocabulary.token_id("no such token") is None
    assert vocabulary.token_bytes(1 << 20) == b"" and vocabulary.token_name(1 << 20) == ""


def test_tokens_that_a_config_adds_to_pieces() -> None:
    pieces = PieceVocabulary(TINY / "tokenizer.model", CONFIG, {"bos_token": "<s>"})
    tokens = pieces.encode("a<user>b<tool>", special=True)
    assert [token for token in tokens if token >= 900] == [900, 901]
    assert (pieces.token_bytes(900), pieces.token_bytes(901)) == (b"", b"<tool>")
    assert pieces.token_name(901) == "<tool>" and pieces.token_id("<user>") == 900
    assert tokens[-1] == pieces.token_id("</s>") != pieces.encode("a", special=False)[-1]
    without = PieceVocabulary(TINY / "tokenizer.model", {"add_bos_token": False}, {})
    assert without.encode("a", special=True) == without.encode("a", special=False)


def saved(place: Path, **changes: Any) -> Path:
    document = json.loads((TINY / "tokenizer.json").read_bytes()) | changes
    path = place / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path


def test_a_normalizer_must_not_make_a_text_much_longer(tmp_path: Path) -> None:
    def replaces(*sizes: int) -> dict[str, Any]:
        steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "b" * size} for size in sizes]
        return {"type": "Sequence", "normalizers": steps}

    JsonVocabulary(saved(tmp_path, normalizer=replaces(8, 8)))
    with pytest.raises(BundleError, match=rf"may make a text 72 times longer, and at most {MOST_GROWTH} is"):
        JsonVocabulary(saved(tmp_path, normalizer=replaces(8, 9)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": {"type": "BPEDecoder", "suffix": "x"}}, "supports: BPEDecoder"),
        ({"decoder": None}, "this runtime supports: none"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "post_processor": None, "added_tokens": []},
         "its vocabulary is empty"),
        ({"model": 5}, "not a tokenizer that can be read"),
    ],
)  # fmt: skip
def test_tokenizers_that_cannot_be_used(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=message):
        JsonVocabulary(saved(tmp_path, **changes))
    (tmp_path / "tokenizer.model").write_bytes(b"noise")
    with pytest.raises(BundleError, match="not a tokenizer that can be read"):
        PieceVocabulary(tmp_path / "tokenizer.model", {}, {})
