"""Reads and checks the vocabulary in a GGUF file's metadata, which may come from strangers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlcbuild.errors import did_you_mean, one_line

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, 1 to 6 in the order normal, unknown, control, user-defined, unused and byte, numbered
alike in GGUF files and in SentencePiece's model files."""
LARGEST_VOCABULARY = 1 << 22
"""Largest number of tokens in a vocabulary that is accepted. The largest published vocabularies have
262,144.
"""
LARGEST_ARRAY = 1 << 24
"""Largest number of entries of an array in a GGUF file's metadata for tokenizers, such as token types or
merges; a longer one is an error. A vocabulary has up to three merges for each token. The list of tokens has
the limit LARGEST_VOCABULARY."""
MODELS = ("gpt2", "llama", "t5", "bert")
"""Supported values of the GGUF metadata key tokenizer.ggml.model: "gpt2" stands for byte-level BPE, "llama"
for SentencePiece BPE, "t5" for SentencePiece unigram, and "bert" for WordPiece.
"""
IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",
    "mask": "mask_token_id",
    "cls": "cls_token_id",
}
"""Role of a token, such as "eos" -> the last part of the metadata key tokenizer.ggml.<...> that holds its id,
in GGUF's spelling.
"""
WORD_PIECE = ("sep", "mask", "cls")
"""Roles of tokens (keys of `IDS`) whose ids are read from a GGUF file's metadata only if its vocabulary is
for WordPiece.
"""
FLAGS = (
    *("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
)
"""Last parts of those metadata keys tokenizer.ggml.<...> of a GGUF file whose values are true or false."""
CONVERT = "convert the model again with a current converter, or use another file"
_NO_TOKEN = (1 << 32) - 1
"""The id -1 as an unsigned number of 32 bits, which llama.cpp's programs write for a token that a vocabulary
lacks."""
_BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class GgufVocabulary:
    """The vocabulary of a GGUF file. Lists are indexed by token id."""

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    """Score of each token, indexed by id, by which SentencePiece chooses among segmentations (higher is
    better); empty for byte-level BPE and WordPiece."""
    merges: list[tuple[str, str]]
    """Pairs of texts of tokens to merge, in the order in which byte-level BPE tries them; empty for other
    tokenizers."""
    pre_tokenizer: str
    ids: Mapping[str, int]
    """Role of a token, such as "bos" -> its id. Roles that the GGUF file does not state are absent, except
    that "unk" is then the first token of the type "unknown", if there is one."""
    flags: Mapping[str, bool]
    """Name of a tokenizer flag, one of `FLAGS` -> its value in the GGUF file. Flags that the GGUF file does
    not state are absent.
    """
    normalization: bytes
    """SentencePiece's compiled table of character replacements; empty if text is not normalized."""


class MetadataReader:
    """Reads values of a GGUF file's metadata by key. Instead of raising an error for each invalid value, it
    adds a message that begins with the key to its list `problems`.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.problems: list[str] = []

    def problem(self, key: str, message: str) -> None:
        self.problems.append(one_line(f"{key}: {message}"))

    def scalar(self, key: str, kind: type[str] | type[int] | type[bool]) -> str | int | bool | None:
        """Returns the value of a metadata key, or None if the key is absent. If the value is not exactly of
        type `kind` (a bool is no int), adds an error message to the attribute `problems` and returns None."""
        value = _plain(self._metadata.get(key))
        if value is None or type(value) is kind:
            return value
        name = {str: "a string", int: "an integer", bool: "true or false"}[kind]
        self.problem(key, f"must be {name}, not {shown(value)}; {CONVERT}")
        return None

    def text(self, key: str) -> str | None:
        value = self.scalar(key, str)
        if not isinstance(value, str):
            return None
        if not _is_utf8(key + value):
            self.problem(
                key, f"must be UTF-8, but {shown(value)} or its key has broken characters; {CONVERT}"
            )
            return None
        return value

    def array(self, key: str, kinds: tuple[type, ...], limit: int = LARGEST_ARRAY) -> Sequence[object] | None:
        """Returns the array under a metadata key as a list, or None if the key is absent. Adds an error
        message to the attribute `problems` and returns None if the value is no array, has more than `limit`
        entries, or has an entry whose type is not one of `kinds`.
        """
        value = self._metadata.get(key)
        if value is None:
            return None
        count = _count(value)
        if count is None:
            self.problem(key, f"must be an array, not {shown(value)}; {CONVERT}")
            return None
        if count > limit:
            self.problem(key, f"has {count} entries, and at most {limit} are read; {CONVERT}")
            return None
        entries_as_list = _plain(value)
        assert isinstance(entries_as_list, list | tuple)
        entries = [_plain(entry) for entry in entries_as_list]
        wrong = next((i for i, entry in enumerate(entries) if type(entry) not in kinds), None)
        if wrong is not None:
            names = " or ".join(kind.__name__ for kind in kinds)
            self.problem(
                key, f"entries must be {names}, but entry {wrong} is {shown(entries[wrong])}; {CONVERT}"
            )
            return None
        return entries

    def strings(self, key: str, limit: int = LARGEST_ARRAY) -> list[str] | None:
        entries = self.array(key, (str,), limit)
        if entries is None:
            return None
        texts = [entry for entry in entries if isinstance(entry, str)]
        wrong = next((i for i, entry in enumerate(texts) if not _is_utf8(entry)), None)
        if wrong is not None:
            self.problem(key, f"entries must be UTF-8, but entry {wrong} has broken characters; {CONVERT}")
            return None
        return texts


def read_vocabulary(reader: MetadataReader) -> GgufVocabulary | None:
    """Reads and checks the vocabulary in GGUF metadata and returns it; returns None if it is invalid, and
    adds the reasons to the attribute `problems` of `reader`, the metadata's reader.
    """
    before = len(reader.problems)
    model = reader.text("tokenizer.ggml.model")
    if len(reader.problems) > before:
        return None
    if model not in MODELS:
        fault = "is absent" if model is None else f"'{model[:100]}' is not supported"
        reader.problem(
            "tokenizer.ggml.model",
            f"{fault}; supported: {', '.join(MODELS)}; use the model's original checkpoint instead",
        )
        return None
    normalization = _normalization(reader) if model == "t5" else b""
    tokens = _tokens(reader)
    ids = _ids(reader, len(tokens), WORD_PIECE if model == "bert" else ())
    flags = {
        name: value
        for name in FLAGS
        if isinstance(value := reader.scalar(f"tokenizer.ggml.{name}", bool), bool)
    }
    for role in ("bos", "eos"):
        if flags.get(f"add_{role}_token") and role not in ids:
            key = f"tokenizer.ggml.add_{role}_token"
            reader.problem(key, f"needs tokenizer.ggml.{IDS[role]}, which is absent or wrong; {CONVERT}")
    types = _types(reader, tokens, ids, pieces=model in ("llama", "t5"))
    if UNKNOWN in types:
        ids.setdefault("unk", types.index(UNKNOWN))
    pre_tokenizer = reader.text("tokenizer.ggml.pre") or ""
    merges = _merges(reader, tokens, types) if model == "gpt2" else []
    scores = _scores(reader, len(tokens)) if model in ("llama", "t5") else []
    if len(reader.problems) > before:
        return None
    return GgufVocabulary(model, tokens, types, scores, merges, pre_tokenizer, ids, flags, normalization)


def _normalization(reader: MetadataReader) -> bytes:
    """Returns SentencePiece's compiled table of character replacements from a GGUF file's metadata; b"" if
    the file has none, or if it is invalid, which becomes a problem of `reader`, the metadata's reader.
    """
    key = "tokenizer.ggml.precompiled_charsmap"
    entries = [entry for entry in reader.array(key, (int,)) or () if isinstance(entry, int)]
    wrong = next((i for i, entry in enumerate(entries) if not -128 <= entry <= 255), None)
    if wrong is not None:
        reader.problem(key, f"entries must be bytes, but entry {wrong} is {shown(entries[wrong])}; {CONVERT}")
        return b""
    return bytes(entry % 256 for entry in entries)


def check_name(reader: MetadataReader, key: str, name: str, names: Sequence[str]) -> bool:
    """Returns True if `name`, the value of the key `key` in a GGUF file's metadata, is one of `names`;
    otherwise adds an error message to the problems of `reader`, the metadata's reader, and returns False.
    """
    if name in names:
        return True
    fault = f"'{name[:100]}' is unknown; {did_you_mean(name, names)}" if name else "is absent"
    reader.problem(key, f"{fault}; use the model's original checkpoint, or {CONVERT}")
    return False


def shown(value: object) -> str:
    """Returns the beginning of a metadata value as text for an error message, with special characters
    escaped; for an array or bytes, only the length.
    """
    if (count := _count(value)) is not None:
        return f"an array of {count}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes that are not UTF-8"
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "an integer of more than 64 bits"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _count(value: object) -> int | None:
    """Returns the number of entries of a list or of an array with one dimension; None for anything else."""
    if isinstance(value, list | tuple):
        return len(value)
    shape = getattr(value, "shape", None)
    return int(shape[0]) if isinstance(shape, tuple) and len(shape) == 1 else None


def _plain(value: object) -> object:
    """Returns a NumPy array or scalar as Python's built-in types; returns any other value unchanged."""
    convert = getattr(value, "tolist", None)
    return value if convert is None else convert()


def _is_utf8(text: str) -> bool:
    """Returns True if a text can be encoded as UTF-8, and False if it contains lone surrogates, as which
    decoders represent invalid bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tokens(reader: MetadataReader) -> list[str]:
    key = "tokenizer.ggml.tokens"
    before = len(reader.problems)
    tokens = reader.strings(key, LARGEST_VOCABULARY)
    if not tokens:
        if len(reader.problems) == before:
            reader.problem(key, f"is absent or empty; {CONVERT}")
        return []
    # llama.cpp names empty tokens in the same way.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        double, count = Counter(tokens).most_common(1)[0]
        reader.problem(key, f"tokens must differ, but {shown(double)} stands {count} times in it; {CONVERT}")
    return tokens


def _ids(reader: MetadataReader, size: int, more: Sequence[str]) -> dict[str, int]:
    """Returns role of a token (a key of IDS) -> its id, from a GGUF file's metadata. size: number of tokens;
    ids that are no integers from 0 to size - 1 are left out and, unless they stand for no token, become
    problems of `reader`, the metadata's reader. more: those of the roles "sep", "mask" and "cls" to read as
    well.
    """
    ids = {}
    for role, name in IDS.items():
        if role in WORD_PIECE and role not in more:
            continue
        value = reader.scalar(f"tokenizer.ggml.{name}", int)
        if not isinstance(value, int) or value == _NO_TOKEN:
            continue
        if 0 <= value < size:
            ids[role] = value
        elif size:
            reader.problem(
                f"tokenizer.ggml.{name}",
                f"must be the id of one of the {size} tokens, not {shown(value)}; {CONVERT}",
            )
    return ids


def _types(reader: MetadataReader, tokens: list[str], ids: Mapping[str, int], pieces: bool) -> list[int]:
    """Returns the type of each token by id, one of GGUF's integers 1 to 6 such as NORMAL, CONTROL or BYTE; []
    for an invalid type. That and a wrong number of types, which are then returned all the same, become
    problems of `reader`, the reader of the GGUF file's metadata. The type 0 in a file counts as NORMAL. A
    file without types has NORMAL tokens and, if `pieces` is True for SentencePiece's tokenizers, BYTE for
    texts such as "<0x0A>". BOS and the tokens that end a text are always CONTROL."""
    key = "tokenizer.ggml.token_type"
    entries = reader.array(key, (int,))
    if entries is None:
        types = [BYTE if pieces and _BYTE_NAME.fullmatch(token) else NORMAL for token in tokens]
    else:
        types = [entry for entry in entries if isinstance(entry, int)]
        _check_length(reader, key, len(types), len(tokens))
        wrong = next((i for i, kind in enumerate(types) if not 0 <= kind <= BYTE), None)
        if wrong is not None:
            reader.problem(key, f"types are 0 to 6, but entry {wrong} is {shown(types[wrong])}; {CONVERT}")
            return []
    for role in ("bos", "eos", "eot", "eom"):
        # These tokens must never appear in a text, whatever type the converter wrote.
        if role in ids and ids[role] < len(types):
            types[ids[role]] = CONTROL
    return [kind or NORMAL for kind in types]


def _scores(reader: MetadataReader, size: int) -> list[float]:
    key = "tokenizer.ggml.scores"
    before = len(reader.problems)
    entries = reader.array(key, (float, int))
    if entries is None:
        if len(reader.problems) == before:
            reader.problem(key, f"is absent, and SentencePiece needs it; {CONVERT}")
        return []
    scores = [entry for entry in entries if isinstance(entry, float | int)]
    _check_length(reader, key, len(scores), size)
    wrong = next((i for i, score in enumerate(scores) if not _is_float32(score)), None)
    if wrong is not None:
        reader.problem(key, f"entries must be finite, but entry {wrong} is {shown(scores[wrong])}; {CONVERT}")
    return [float(score) if _is_float32(score) else 0.0 for score in scores]


def _is_float32(score: float) -> bool:
    return abs(score) < 3.4e38 and not math.isnan(score)


def _merges(reader: MetadataReader, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    before = len(reader.problems)
    entries = reader.strings(key)
    if entries is None:
        if len(reader.problems) == before:
            reader.problem(key, f"is absent, and byte-level BPE needs it; {CONVERT}")
        return []
    unused = {token for token, kind in zip(tokens, types, strict=False) if kind == UNUSED}
    mergeable = set(tokens) - unused
    merges: dict[tuple[str, str], None] = {}  # the first of equal pieces counts
    wrong = 0
    for i, entry in enumerate(entries):
        cut = entry.find(" ", 1)
        pair = entry[:cut], entry[cut + 1 :]
        if cut > 0 and mergeable.issuperset((*pair, "".join(pair))):
            merges[pair] = None
            continue
        if not wrong and tokens:
            rule = "must be two tokens with a space between them, which together are a token, too"
            reader.problem(key, f"entries {rule}, but entry {i} is {shown(entry)}; {CONVERT}")
        wrong += 1
    return list(merges)


def _check_length(reader: MetadataReader, key: str, count: int, size: int) -> None:
    if size and count != size:
        reader.problem(key, f"must have an entry for each of the {size} tokens, but has {count}; {CONVERT}")
