"""Writes SentencePiece's tokenizer.model from the vocabulary of a GGUF file.

The file is a protocol buffer, `ModelProto` of sentencepiece_model.proto. Its few fields are encoded here:
sentencepiece reads such files without the protobuf package, but has no function that writes one.
"""

from __future__ import annotations

import struct

import numpy as np

from mlcbuild.canon import Json
from mlcbuild.checkpoints.gguf_vocabulary import (
    BYTE,
    CONTROL,
    CONVERT,
    UNKNOWN,
    USER_DEFINED,
    GgufVocabulary,
    MetadataReader,
    shown,
)

_SPACE = "▁"
_BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]
_UNIGRAM, _BPE = 1, 2
_TYPES = "tokenizer.ggml.token_type"
_PHI3 = frozenset({"<|assistant|>", "<|end|>", "<|placeholder1|>", "<|user|>"})
"""Control tokens that together are only in the vocabulary of Phi-3, Phi-3.5 and Phi-3.5-MoE, so that a GGUF
file with all of them is recognized as one of these models.
"""
_PHI3_KEEPS = frozenset({"<s>", "<unk>", "<|endoftext|>"})
"""Special tokens of the vocabulary of Phi-3 after which a tokenizer keeps white space when it encodes text;
after its other special tokens it removes white space.
"""


def tokenizer_model(vocabulary: GgufVocabulary, reader: MetadataReader) -> bytes:
    """Returns the bytes of a SentencePiece tokenizer.model with the vocabulary of a GGUF file. If
    SentencePiece would refuse the file, adds a problem to `reader`, the reader of the file's metadata; the
    caller must then discard the bytes.
    """
    tokens, types = _escaped(vocabulary), _with_unknown(vocabulary, reader)
    _check_bytes(vocabulary, types, reader)
    broken = next((i for i, token in enumerate(tokens) if types[i] == USER_DEFINED and "\0" in token), None)
    if broken is not None:
        # SentencePiece compares these texts as C strings, which end at a zero byte.
        reader.problem(
            "tokenizer.ggml.tokens", f"entry {broken} is {shown(tokens[broken])}, with NUL in it; {CONVERT}"
        )
    pieces = (
        _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for token, score, kind in zip(tokens, vocabulary.scores, types, strict=True)
    )
    trainer = _number(3, _BPE if vocabulary.model == "llama" else _UNIGRAM)
    trainer += _number(4, len(tokens)) + _number(35, int(BYTE in types))
    for i, role in enumerate(("unk", "bos", "eos", "pad")):
        token = vocabulary.ids.get(role) if role != "unk" else _index(types, UNKNOWN)
        # An id without a token is -1, as an unsigned number of 64 bits. A name that is no piece is ignored.
        trainer += _number(40 + i, (1 << 64) - 1 if token is None else token)
        trainer += _field(45 + i, b"\0" if token is None else tokens[token].encode())
    prefix = vocabulary.flags.get("add_space_prefix", True)
    table = vocabulary.normalization
    if table:
        _check_table(table, reader)
    normalizer = _field(1, b"nmt_nfkc") + _field(2, table) if table else _field(1, b"identity")
    removes_spaces = vocabulary.model == "t5" and vocabulary.flags.get("remove_extra_whitespaces", False)
    normalizer += _number(3, int(prefix)) + _number(4, int(removes_spaces)) + _number(5, 1)
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)


def split_tokens(vocabulary: GgufVocabulary) -> dict[int, dict[str, Json]]:
    """Returns token id -> entry in tokenizer_config.json (its text as "content", "special": True for a
    control token, and in Phi-3 "rstrip": True), for the tokens that the tokenizer must split off before
    SentencePiece adds its leading space: user-defined tokens other than spaces and texts with "▁", unless the
    file turns that space off; in Phi-3 also all special tokens but <s>, <unk> and <|endoftext|>.

    llama.cpp and the original models begin the text after such a token with a space. In Phi-3, white space
    after special tokens is removed, which GGUF files do not state; if it stayed, prompts would have a token
    for each line break of the chat template.
    """
    kinds = list(enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)))
    is_phi3 = _PHI3.issubset(token for _, (token, kind) in kinds if kind == CONTROL)
    entries: dict[int, dict[str, Json]] = {}
    for i, (token, kind) in kinds:
        splits = kind == USER_DEFINED and _SPACE not in token and bool(token.strip(" "))
        strips = is_phi3 and kind in (CONTROL, USER_DEFINED) and token not in _PHI3_KEEPS
        if strips or (splits and vocabulary.flags.get("add_space_prefix", True)):
            entries[i] = {"content": token, "special": kind == CONTROL}
        if strips:
            entries[i]["rstrip"] = True
    return entries


def _check_table(table: bytes, reader: MetadataReader) -> None:
    """Adds a problem to `reader`, the reader of a GGUF file's metadata, if SentencePiece's table of character
    replacements would lead SentencePiece beyond the table's end. table: 4 bytes (little-endian) with the size
    of a trie, the trie, and the replacements, each of which ends with a zero byte."""
    size = int.from_bytes(table[:4], "little")
    trie, texts = table[4 : 4 + size], table[4 + size :]
    units = np.frombuffer(trie[: len(trie) // 4 * 4], "<u4").astype(np.int64)
    numbers, is_value = np.arange(len(units)), units >> 31 == 1
    targets = numbers ^ (units >> 10 << ((units & 512) >> 6)) | 255
    is_sound = len(units) > 0 and texts.endswith(b"\0")
    if (
        not is_sound
        or (np.where(is_value, (units & 0x7FFFFFFF) + len(units) - len(texts), targets) >= len(units)).any()
    ):
        reader.problem(
            "tokenizer.ggml.precompiled_charsmap", f"is damaged: it points beyond its end; {CONVERT}"
        )


def _escaped(vocabulary: GgufVocabulary) -> list[str]:
    """Returns the texts of all tokens of a GGUF file's vocabulary, indexed by id. In user-defined tokens,
    where converters leave spaces, each space becomes SentencePiece's "▁", unless another token has that text.
    """
    tokens = set(vocabulary.tokens)
    return [
        token.replace(" ", _SPACE)
        if kind == USER_DEFINED and token.replace(" ", _SPACE) not in tokens
        else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]


def _index(types: list[int], kind: int) -> int | None:
    return types.index(kind) if kind in types else None


def _with_unknown(vocabulary: GgufVocabulary, reader: MetadataReader) -> list[int]:
    """Returns the type of each token of a GGUF file's vocabulary, indexed by id, changed so that exactly one
    token is the unknown one, as SentencePiece requires: the one with the id for "unk". Without such an id,
    adds a problem to `reader`, the metadata's reader, and returns types without an unknown token.

    Some files have more, Phi-3's 53. The others become control tokens, to which no merge leads.
    """
    unknown = vocabulary.ids.get("unk")
    if unknown is None:
        reader.problem(_TYPES, f"exactly one token must be unknown (2), and none is; {CONVERT}")
    types = [CONTROL if kind == UNKNOWN else kind for kind in vocabulary.types]
    if unknown is not None:
        types[unknown] = UNKNOWN
    return types


def _check_bytes(vocabulary: GgufVocabulary, types: list[int], reader: MetadataReader) -> None:
    names = {token for token, kind in zip(vocabulary.tokens, types, strict=True) if kind == BYTE}
    if names and names != set(_BYTE_NAMES):
        odd = sorted(names.symmetric_difference(_BYTE_NAMES))
        reader.problem(
            _TYPES,
            f"the byte tokens (6) must be all of <0x00> to <0xFF>, but {len(odd)} are missing or have other"
            f" names, {shown(odd[0])} for one; {CONVERT}",
        )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
