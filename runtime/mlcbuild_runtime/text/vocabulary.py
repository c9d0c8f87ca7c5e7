"""Text to tokens and tokens to bytes, for both kinds of tokenizer files.

Tokens become bytes, not text: one character may be spread over several tokens, and only the bytes of all of
them say which it is. text.py joins them.
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
"""Bytes of tokenizer.json or tokenizer.model."""
_SPACE = "▁"
"""How SentencePiece writes a space inside a piece."""


class Vocabulary(Protocol):
    """What text.py needs of a tokenizer."""

    leading_space: bool
    """The tokenizer puts a space before a text that has none: the first token of a message carries it."""

    def encode(self, text: str, special: bool) -> list[int]:
        """Tokens of a text. `special`: with the BOS (and so on) that the tokenizer adds to a prompt."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 of one token, perhaps a part of a character; nothing for special tokens."""
        ...

    def token_name(self, token: int) -> str:
        """How the tokenizer writes a token, special or not."""
        ...

    def token_id(self, name: str) -> int | None: ...


class JsonVocabulary:
    """tokenizer.json, by the tokenizers library."""

    def __init__(self, path: Path) -> None:
        """Raises BundleError."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # cores are the model's
        from tokenizers import Tokenizer

        data = files.read_bytes(path, MAX_TOKENIZER)
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(data)
        except BaseException as error:
            raise BundleError(f"{path}: not a tokenizer that can be read: {_reason(error)}") from None
        if not self._tokenizer.get_vocab_size(with_added_tokens=False):
            raise BundleError(f"{path}: not a tokenizer that can be read: its vocabulary is empty")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._added = {
            token: (added.content, added.special)
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._bytes: dict[int, bytes] = {}
        steps = _decoder_steps(self._tokenizer)
        self._byte_level = "ByteLevel" in steps
        self._fallback = "ByteFallback" in steps
        self.leading_space = bool(steps.keys() & {"Strip", "Metaspace"})
        known = {"ByteLevel", "ByteFallback", "Replace", "Fuse", "Strip", "Metaspace"}
        if steps.keys() - known or not steps:
            found = ", ".join(sorted(steps.keys() - known)) or "none"
            raise BundleError(f"{path}: its decoder is not of a kind this runtime knows: {found}")

    def encode(self, text: str, special: bool) -> list[int]:
        # A batch lets other threads run meanwhile; fast: without the places of tokens in the text.
        try:
            (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except BaseException as error:
            reason = _reason(error)
            raise RequestError(f"the model's tokenizer cannot read this text: {reason}", status=500) from None
        return list(found.ids)

    def token_bytes(self, token: int) -> bytes:
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    def _find_bytes(self, token: int) -> bytes:
        if token in self._added:
            content, special = self._added[token]
            return b"" if special else content.encode()
        piece = self._tokenizer.id_to_token(token) or ""
        if self._byte_level:
            return _byte_level(piece)
        return _piece_bytes(piece, self._fallback)

    def token_name(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def token_id(self, name: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(name)
        return found


def _reason(error: BaseException) -> str:
    """What the tokenizers library says. It raises bare Exception for what it refuses, and a BaseException of
    a type without a public name where its code panics; anything else goes on."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return printable(error, 300)
    raise error


def _decoder_steps(tokenizer: Tokenizer) -> dict[str, Json]:
    """The steps of its decoder by type. The state is the same JSON as in tokenizer.json."""
    if tokenizer.decoder is None:
        return {}
    state = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return {step["type"]: step for step in steps}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 for itself, the rest from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_ALPHABET[letter] for letter in piece)
    except KeyError:  # the decoder of the tokenizers library takes such a piece as it is
        return piece.encode()


def _piece_bytes(piece: str, fallback: bool) -> bytes:
    if fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_SPACE, " ").encode()


class PieceVocabulary:
    """tokenizer.model, by the sentencepiece library, with the tokens that tokenizer_config.json adds."""

    def __init__(self, path: Path, config: Mapping[str, Json], special: Mapping[str, str]) -> None:
        """`special`: the named special tokens, such as bos_token. Raises BundleError."""
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
        self._special = {token for token in range(self._size) if self._model.is_control(token)}
        self._special |= {token for token, (_, is_special) in self._added.items() if is_special}
        names = [*special.values(), *_names(config.get("additional_special_tokens"))]
        self._special |= {found for name in names if (found := self.token_id(name)) is not None}
        self._legacy = config.get("legacy") is not False
        self.leading_space = self._model.encode("a") != self._bare.encode("a")

    @cached_property
    def _names(self) -> dict[str, int]:
        """Tokens that are found in a text before SentencePiece sees it."""
        own = {self.token_name(token): token for token in self._special}
        return own | {content: token for token, (content, _) in self._added.items()}

    def encode(self, text: str, special: bool) -> list[int]:
        tokens: list[int] = []
        if special and self._config.get("add_bos_token", True) and self._model.bos_id() >= 0:
            tokens.append(self._model.bos_id())
        pattern = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        for i, part in enumerate(re.split(f"({pattern})", text) if pattern else [text]):
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
            return self._added[token][0].encode()
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
        found = int(self._model.piece_to_id(name))
        return None if self._model.is_unknown(found) and self._model.id_to_piece(found) != name else found


def _names(listed: Json) -> list[str]:
    """Contents of a list of tokens, each a text or an object."""
    entries = listed if isinstance(listed, list) else []
    contents = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return [content for content in contents if isinstance(content, str)]


def _added_tokens(config: Mapping[str, Json]) -> dict[int, tuple[str, bool]]:
    """Token -> (content, special), from `added_tokens_decoder`."""
    listed = config.get("added_tokens_decoder")
    found = {}
    for token, entry in listed.items() if isinstance(listed, dict) else ():
        match entry:
            case {"content": str(content), **other} if re.fullmatch("[0-9]{1,9}", token):
                found[int(token)] = content, other.get("special") is True
    return found
