"""Converts text to tokens and tokens to bytes, with a tokenizer.json or with a tokenizer.model of
SentencePiece.

Tokens become bytes instead of text, because several tokens may share one character, which only all their
bytes determine. tokenizer.py joins them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mlcbuild_format import files
from mlcbuild_format.errors import BundleError, RequestError
from mlcbuild_format.fields import Json, printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENIZER = 256 << 20
"""Largest tokenizer.json or tokenizer.model that is read, in bytes; a larger file raises BundleError."""
_SPACE = "▁"
"""The letter that SentencePiece writes for a space inside a piece."""
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""The characters with Unicode's property White_Space, which added tokens with `rstrip` remove after them.
Python's `str.strip` strips four more."""
_CLEANED = {
    **{f" {mark}": mark for mark in ".?!,"},
    " ' ": "'",
    **{f" {ending}": ending for ending in ("n't", "'m")},
    " do not": " don't",
    **{f" {ending}": ending for ending in ("'s", "'ve", "'re")},
}
"""Text -> its replacement, applied in this order, in tokenizers whose WordPiece decoder cleans up the text of
tokens."""


class Vocabulary(Protocol):
    """The interface of a tokenizer's vocabulary: it converts text to tokens, and tokens to
    bytes and names."""

    leading_space: bool
    """True if the tokenizer puts a space before a text that has none, so that the first token of a message
    carries one."""

    def encode(self, text: str, special: bool) -> list[int]:
        """Returns the tokens of a text. special: True if BOS and other tokens of prompts are added; special
        tokens that the text spells out are recognized in either case. Raises RequestError for a text that the
        tokenizer cannot read."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Returns the UTF-8 bytes of one token, which may be part of a character; b"" for a special token, or
        one that the vocabulary lacks."""
        ...

    def token_name(self, token: int) -> str:
        """Returns the name of a token, special or not, as the tokenizer file spells it; "" if the vocabulary
        lacks it."""
        ...

    def token_id(self, name: str) -> int | None: ...


class JsonVocabulary:
    """The vocabulary in a tokenizer.json, read by the tokenizers library."""

    def __init__(self, path: Path) -> None:
        """Reads a tokenizer.json. Raises BundleError for a damaged or unsupported file."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # The cores are needed for the model.
        from tokenizers import Tokenizer

        data = files.read_bytes(path, MAX_TOKENIZER)
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(data)
        except BaseException as error:
            raise BundleError(f"{path}: not a tokenizer that can be read: {_reason(error)}") from None
        if not self._tokenizer.get_vocab_size(with_added_tokens=False):
            raise BundleError(f"{path}: not a tokenizer that can be read: its vocabulary is empty")
        if (growth := _growth(self._tokenizer)) > MOST_GROWTH:
            raise BundleError(
                f"{path}: its normalizer may make a text {growth} times longer, and at most {MOST_GROWTH} is"
                " accepted, since a prompt could take all memory; build the bundle from another file"
            )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if hasattr(self._tokenizer.model, "dropout"):
            # It is for training, where a text gets other tokens each time.
            self._tokenizer.model.dropout = None
        self._added = {
            token: (added.content, added.special)
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._bytes: dict[int, bytes] = {}
        steps = _decoder_steps(self._tokenizer)
        self._byte_level = "ByteLevel" in steps
        self._fallback = "ByteFallback" in steps
        self._word_piece = steps.get("WordPiece")
        self.leading_space = bool(steps.keys() & {"Strip", "Metaspace", "WordPiece"})
        supported = {"ByteLevel", "ByteFallback", "Replace", "Fuse", "Strip", "Metaspace", "WordPiece"}
        if steps.keys() - supported or not steps:
            unsupported = ", ".join(sorted(steps.keys() - supported)) or "none"
            raise BundleError(f"{path}: its decoder is not of a kind this runtime supports: {unsupported}")

    def encode(self, text: str, special: bool) -> list[int]:
        # Encoding a batch releases the GIL; the fast variant computes no offsets.
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except BaseException as error:
            reason = _reason(error)
            raise RequestError(f"the model's tokenizer cannot read this text: {reason}", status=500) from None
        return list(encoding.ids)

    def token_bytes(self, token: int) -> bytes:
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._find_bytes(token)
        return data

    def _find_bytes(self, token: int) -> bytes:
        content, is_special = self._added.get(token, (None, False))
        if is_special:
            return b""
        piece = self._tokenizer.id_to_token(token) or ""
        if self._word_piece is not None:
            return _word_piece(piece, self._word_piece)
        if self._byte_level:
            return _byte_level(piece) if content is None else content.encode()
        # Gemma adds its pieces for several spaces as tokens, so the decoder applies to added ones, too.
        return _piece_bytes(piece, self._fallback)

    def token_name(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def token_id(self, name: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(name)
        return token_id


def _reason(error: BaseException) -> str:
    """Returns the message, of at most 300 characters, of an exception from the tokenizers library: any
    Exception, or the PanicException of its Rust code, which is a BaseException without a public name. Raises
    any other error, such as KeyboardInterrupt, again."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return printable(error, 300)
    raise error


MOST_GROWTH = 64
"""Maximum factor by which replacements in a tokenizer's normalizer may make a text longer, in characters; a
tokenizer with a larger one is refused. Usual ones replace a space by one letter."""


def _growth(tokenizer: Tokenizer) -> int:
    """Returns the largest factor by which the replacements in a tokenizer's normalizer may make a text
    longer, in characters: the product over its steps; 1 without a normalizer."""
    if tokenizer.normalizer is None:
        return 1
    growth, steps = 1, [json.loads(tokenizer.normalizer.__getstate__())]
    while steps:
        step = steps.pop()
        steps += step.get("normalizers", ())
        growth *= max(1, len(step.get("content", "")), len(step.get("prepend", "")))
    return growth


def _decoder_steps(tokenizer: Tokenizer) -> dict[str, Json]:
    """Returns the settings of each step of a tokenizer's decoder: type of the step -> its JSON object in
    tokenizer.json, that of the last step of this type; {} without a decoder."""
    if tokenizer.decoder is None:
        return {}
    state = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return {step["type"]: step for step in steps}


def _byte_alphabet() -> dict[str, int]:
    """Returns letter -> byte, for the letters that GPT-2's vocabulary uses for bytes: printable Latin-1
    letters stand for themselves, the letters from U+0100 on for the other bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_ALPHABET[letter] for letter in piece)
    except KeyError:  # The decoder of the tokenizers library does the same.
        return piece.encode()


def _piece_bytes(piece: str, fallback: bool) -> bytes:
    if fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_SPACE, " ").encode()


def _word_piece(piece: str, settings: Json) -> bytes:
    """Returns the UTF-8 bytes that a token of a WordPiece vocabulary contributes to a text, with a space in
    front unless the token continues a word. settings: JSON object of the tokenizer's decoder, with the
    `prefix` of continuing tokens, and `cleanup`, True if spaces before punctuation and contractions are
    removed."""
    assert isinstance(settings, dict)
    prefix = str(settings["prefix"])
    text = piece[len(prefix) :] if piece.startswith(prefix) else f" {piece}"
    for dirty, clean in _CLEANED.items() if settings["cleanup"] else ():
        text = text.replace(dirty, clean)
    return text.encode()


class PieceVocabulary:
    """The vocabulary in a tokenizer.model, read by the sentencepiece library, with the tokens that
    tokenizer_config.json adds."""

    def __init__(self, path: Path, config: Mapping[str, Json], special: Mapping[str, str]) -> None:
        """Reads a tokenizer.model. config: its tokenizer_config.json, which may add tokens; special: name of
        a special token, such as bos_token -> its text. Raises BundleError for a damaged file."""
        from sentencepiece import SentencePieceProcessor

        try:
            model = files.read_bytes(path, MAX_TOKENIZER)
            self._model = SentencePieceProcessor(model_proto=model)
            # A serialized message with fields appended is that message with these fields replaced:
            # normalizer_spec (3) { add_dummy_prefix (3): false }.
            self._bare = SentencePieceProcessor(model_proto=model + b"\x1a\x02\x18\x00")
        except (OSError, RuntimeError, ValueError) as error:
            raise BundleError(f"{path}: not a tokenizer that can be read: {printable(error, 300)}") from None
        self._config = config
        self._size: int = self._model.get_piece_size()
        self._added = _added_tokens(config)
        self._stripping = _stripping(config)
        self._special = {token for token in range(self._size) if self._model.is_control(token)}
        self._special |= {token for token, (_, is_special) in self._added.items() if is_special}
        names = [*special.values(), *_names(config.get("additional_special_tokens"))]
        self._special |= {token for name in names if (token := self.token_id(name)) is not None}
        self._legacy = config.get("legacy") is not False
        self.leading_space = self._model.encode("a") != self._bare.encode("a")

    @cached_property
    def _names(self) -> dict[str, int]:
        """Returns text -> number of the token, for the special and added tokens of the vocabulary. They are
        split off before SentencePiece encodes the rest of a text."""
        special = {self.token_name(token): token for token in self._special}
        return special | {content: token for token, (content, _) in self._added.items()}

    def encode(self, text: str, special: bool) -> list[int]:
        tokens: list[int] = []
        if special and self._config.get("add_bos_token", True) and self._model.bos_id() >= 0:
            tokens.append(self._model.bos_id())
        pattern = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        for i in range(1, len(parts), 2):
            if parts[i] in self._stripping:
                parts[i + 1] = parts[i + 1].lstrip(_WHITE_SPACE)
        for i, part in enumerate(parts):
            if i % 2:
                tokens.append(self._names[part])
            elif part:
                # Newer tokenizers put no space before text that follows a special token.
                model = self._model if self._legacy or i == 0 else self._bare
                tokens.extend(model.encode(part))
        if special and self._config.get("add_eos_token", False) and self._model.eos_id() >= 0:
            tokens.append(self._model.eos_id())
        return tokens

    def token_bytes(self, token: int) -> bytes:
        if token in self._special:
            return b""
        if token in self._added:
            return _piece_bytes(self._added[token][0], fallback=False)
        if not 0 <= token < self._size:
            return b""
        if self._model.is_unknown(token):
            return " \u2047 ".encode()
        return _piece_bytes(self._model.id_to_piece(token), self._model.is_byte(token))

    def token_name(self, token: int) -> str:
        if token in self._added:
            return self._added[token][0]
        return str(self._model.id_to_piece(token)) if 0 <= token < self._size else ""

    def token_id(self, name: str) -> int | None:
        for token, (content, _) in self._added.items():
            if content == name:
                return token
        token = int(self._model.piece_to_id(name))
        return None if self._model.is_unknown(token) and self._model.id_to_piece(token) != name else token


def _names(listed: Json) -> list[str]:
    """Returns the texts of special tokens from a list in a tokenizer's config, whose entries are strings or
    objects with `content`."""
    entries = listed if isinstance(listed, list) else []
    contents = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return [content for content in contents if isinstance(content, str)]


def _added_tokens(config: Mapping[str, Json]) -> dict[int, tuple[str, bool]]:
    """Returns number of a token -> (text, True if the token is special), from the field
    `added_tokens_decoder` of a tokenizer's config, without invalid entries; {} if there is no such field."""
    listed = config.get("added_tokens_decoder")
    added = {}
    for token, entry in listed.items() if isinstance(listed, dict) else ():
        match entry:
            case {"content": str(content), **other} if re.fullmatch("[0-9]{1,9}", token):
                added[int(token)] = content, other.get("special") is True
    return added


def _stripping(config: Mapping[str, Json]) -> set[str]:
    """Returns the texts of the added tokens that remove white space after them, from a tokenizer's config."""
    listed = config.get("added_tokens_decoder")
    texts = set()
    for entry in listed.values() if isinstance(listed, dict) else ():
        match entry:
            case {"content": str(content), "rstrip": True}:
                texts.add(content)
    return texts
