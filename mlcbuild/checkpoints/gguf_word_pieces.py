"""Describes the WordPiece tokenizer of a GGUF file as BERT's tokenizer.json does.

llama.cpp marks the beginning of a word with "▁", whereas BERT's vocabulary marks all tokens that do not begin
a word with "##".
"""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.canon import Json
from mlcbuild.checkpoints.gguf_vocabulary import (
    CONTROL,
    CONVERT,
    IDS,
    NORMAL,
    UNUSED,
    GgufVocabulary,
    MetadataReader,
)

_SPACE, _PREFIX = "▁", "##"
_NAMES = {"cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"}
"""Role of a token, such as "cls" -> its name in BERT's vocabularies, such as "[CLS]"."""
_LONGEST_WORD = 100
"""Maximum number of characters of a word that WordPiece divides into tokens, the value of all published
tokenizers. A longer word becomes the token for unknown words."""


def as_word_pieces(vocabulary: GgufVocabulary, reader: MetadataReader) -> GgufVocabulary:
    """Returns the WordPiece vocabulary of a GGUF file with its tokens written as in BERT's vocabulary ("##"
    before a token that does not begin a word); all special tokens get the token type CONTROL.

    Where the metadata state no id for [CLS], [SEP], [UNK], [PAD] or [MASK], it is that of the token with this
    name. The BOS id becomes that of [CLS], whatever the metadata state, and the EOS id becomes that of [SEP]
    if they state none. Adds a problem to `reader`, the reader of the metadata, if there is no id for [CLS],
    [SEP] or [UNK], or two tokens would have the same text; the result must not be used then.
    """
    ids = dict(vocabulary.ids)
    for role, name in _NAMES.items():
        if role not in ids and name in vocabulary.tokens:
            ids[role] = vocabulary.tokens.index(name)
    for role in ("cls", "sep", "unk"):
        if role not in ids:
            reader.problem(f"tokenizer.ggml.{IDS[role]}", f"is absent, and WordPiece needs it; {CONVERT}")
    special = {ids[role] for role in ids}
    types = [CONTROL if i in special else kind for i, kind in enumerate(vocabulary.types)]
    words = {token for token in vocabulary.tokens if token.startswith(_SPACE)}
    tokens = [
        _original(token, words) if kind == NORMAL else token
        for token, kind in zip(vocabulary.tokens, types, strict=True)
    ]
    if len(set(tokens)) < len(tokens):
        reader.problem(
            "tokenizer.ggml.tokens",
            f"tokens must differ when '{_SPACE}' at their beginning is removed; {CONVERT}",
        )
    if "cls" in ids:
        ids["bos"] = ids["cls"]
    if "sep" in ids:
        ids.setdefault("eos", ids["sep"])
    return replace(vocabulary, tokens=tokens, types=types, ids=ids)


def word_piece_parts(vocabulary: GgufVocabulary) -> dict[str, Json]:
    """Returns those fields of a tokenizer.json that depend on the kind of tokenizer (normalizer,
    pre_tokenizer, post_processor, decoder, model), for WordPiece. vocabulary: a GGUF file's vocabulary with
    its tokens written as in BERT's ("##" before a token that does not begin a word) and with the ids of
    [CLS], [SEP] and [UNK]. Tokens of the type UNUSED are left out; the others keep their ids. Text is
    lowercased if the file says so or, where it says nothing, if its words have no capital letters."""
    lowercase = vocabulary.flags.get("normalizer.lowercase", _is_uncased(vocabulary))
    first, last = (vocabulary.tokens[vocabulary.ids[role]] for role in ("cls", "sep"))
    single: list[Json] = [_special(first, 0), {"Sequence": {"id": "A", "type_id": 0}}, _special(last, 0)]
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": vocabulary.flags.get("normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}, _special(last, 1)],
            "special_tokens": {
                name: {"id": name, "ids": [vocabulary.ids[role]], "tokens": [name]}
                for role, name in (("cls", first), ("sep", last))
            },
        },
        "decoder": {"type": "WordPiece", "prefix": _PREFIX, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.tokens[vocabulary.ids["unk"]],
            "continuing_subword_prefix": _PREFIX,
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": {
                token: i
                for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
                if kind != UNUSED
            },
        },
    }


def _special(name: str, kind: int) -> Json:
    """Returns the JSON object of a special token in the template by which tokenizer.json adds such tokens to
    texts. kind: 0 in the first of two texts, 1 in the second.
    """
    return {"SpecialToken": {"id": name, "type_id": kind}}


def _original(token: str, words: set[str]) -> str:
    """Returns the text of a token of a GGUF file in BERT's vocabulary: a word without the "▁" at its
    beginning, or any other token (a lone "▁" too) with "##" before it. words: all tokens that begin with "▁".

    Old converters stored special tokens in brackets, such as [CLS], without "▁"; they are returned unchanged,
    unless `words` has the same text after "▁": then they get "##", too.
    """
    if token.startswith(_SPACE) and len(token) > 1:
        return token[1:]
    is_name = token.startswith("[") and token.endswith("]") and len(token) > 2
    return token if is_name and _SPACE + token not in words else _PREFIX + token


def _is_uncased(vocabulary: GgufVocabulary) -> bool:
    """Returns True if no normal token of a GGUF file's vocabulary, apart from those that begin with "[", has
    a capital letter from A to Z, so that text must be lowercased: old files do not state it, and llama.cpp
    then lowercases for every vocabulary.
    """
    return not any(
        "A" <= letter <= "Z"
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind == NORMAL and not token.startswith("[")
        for letter in token
    )
