"""Text in, text out: prompts to tokens, and tokens to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from mlcbuild_format import files
from mlcbuild_format.errors import BundleError, RequestError
from mlcbuild_format.fields import Json
from mlcbuild_format.manifest import Manifest, Serving

from mlcbuild_runtime.text.chat_template import TEMPLATES, ChatTemplate, Message, find_template
from mlcbuild_runtime.text.vocabulary import JsonVocabulary, PieceVocabulary, Vocabulary

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *TEMPLATES,
)
"""Files of a bundle or a checkpoint that are read here."""
MAX_CONFIG = 32 << 20
"""Bytes of tokenizer_config.json, which may list every token."""


class Tokenizer:
    """The tokenizer of a bundle or of a checkpoint's directory."""

    def __init__(
        self, vocabulary: Vocabulary, template: ChatTemplate, bos: int | None, eos: Iterable[int]
    ) -> None:
        """Use `load`."""
        self.vocabulary, self.template, self.bos, self.eos = vocabulary, template, bos, frozenset(eos)

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Tokenizer:
        """The tokenizer of the bundle in directory `path`, from the files that its manifest lists.

        Files of strangers may end the process: `mlcbuild_runtime.loading` tries them first. Raises
        BundleError with one sentence.
        """
        found = cls.load(path, manifest.serving, manifest.files)
        found.eos = frozenset(token for token in found.eos if token < manifest.vocab_size)
        return found

    @classmethod
    def load(
        cls, path: Path, serving: Serving | None = None, names: Collection[str] | None = None
    ) -> Tokenizer:
        """Reads the tokenizer's files in directory `path`. Raises BundleError with one sentence.

        A message ends at any of the tokens that `serving` names, and at the tokenizer's own eos_token.
        `names`: files that may be read; by default those of FILES that are there.
        """
        serving = serving or Serving()
        known = FILES if names is None else [name for name in FILES if name in names]
        present = {name for name in known if (path / name).is_file()}
        config = _object(path, "tokenizer_config.json", present)
        special = _special_tokens(_object(path, "special_tokens_map.json", present) | config)
        vocabulary: Vocabulary
        if "tokenizer.json" in present:
            vocabulary = JsonVocabulary(path / "tokenizer.json")
        elif "tokenizer.model" in present:
            vocabulary = PieceVocabulary(path / "tokenizer.model", config, special)
        else:
            raise BundleError(f"{path}: there is neither tokenizer.json nor tokenizer.model in it")
        ends = set(serving.eos_token_ids)
        ends |= {token for token in [vocabulary.token_id(special.get("eos_token", ""))] if token is not None}
        bos = serving.bos_token_id
        if bos is None and "bos_token" in special:
            bos = vocabulary.token_id(special["bos_token"])
        return cls(vocabulary, ChatTemplate(find_template(path, config, present), special), bos, ends)

    def encode(self, text: str, longest: int | None = None) -> list[int]:
        """Tokens of a prompt, with BOS where the tokenizer adds one. A BOS in the text is not doubled.
        `longest`: bytes that the text may have. Raises RequestError."""
        check_length(text, longest)
        tokens = self.vocabulary.encode(text, special=True)
        if self.bos is not None and tokens[:2] == [self.bos, self.bos]:
            return tokens[1:]
        return tokens

    def chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Json] | None = None,
        longest: int | None = None,
    ) -> list[int]:
        """Tokens of the prompt for an answer to `messages`; `options` are more variables for the template.
        `longest`: bytes that the prompt may have.

        The template writes every special token itself. Raises RequestError.
        """
        text = self.template.render(messages, options or {})
        check_length(text, longest)
        return self.vocabulary.encode(text, special=False)

    def stream(
        self, stop: Sequence[str] = (), message: bool = False, shown: Mapping[int, str] | None = None
    ) -> TextStream:
        """`message`: the text is a whole message, not the continuation of one. `shown`: what special tokens
        are in the text, where they are."""
        return TextStream(self.vocabulary, stop, message and self.vocabulary.leading_space, shown)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a whole sequence of tokens, special ones left out."""
        stream = self.stream(message=True)
        return "".join([*(stream.push(token) for token in tokens), stream.finish()])

    def offsets(self, tokens: Iterable[int]) -> list[int]:
        """Where in the text of `decode`, in characters, each of the tokens begins."""
        stream, sizes = self.stream(message=True), [0]
        for token in tokens:
            sizes.append(len(stream.push(token)))
        return list(accumulate(sizes[:-1]))


def check_length(text: str, longest: int | None) -> None:
    """Raises RequestError for a text of more than `longest` bytes: to find the tokens of a megabyte takes a
    second."""
    if longest is not None and len(text) * 4 > longest and (size := len(text.encode())) > longest:
        raise RequestError(
            f"the prompt has {size} bytes, and the context has no room for more than {longest}: shorten it",
            code="context_length_exceeded",
        )


class TextStream:
    """Tokens to text, piece by piece: never half a character, never a part of a stop string."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str],
        strip: bool,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._vocabulary, self._stop, self._strip, self._shown = vocabulary, stop, strip, shown or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        """A stop string has appeared: no more text will come."""

    def push(self, token: int) -> str:
        """The text that is certain now."""
        shown = self._shown.get(token)
        data = self._vocabulary.token_bytes(token) if shown is None else shown.encode()
        return self._take(self._decoder.decode(data))

    def finish(self) -> str:
        """What is left when no more tokens come: an unfinished character becomes U+FFFD."""
        text = self._take(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _take(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        if self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        if not self._stop:
            return text
        text = self._held + text
        # The one that is complete first counts, however the tokens cut the text.
        ends = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _object(path: Path, name: str, present: Collection[str]) -> dict[str, Json]:
    return files.read_json(path / name, MAX_CONFIG) if name in present else {}


def _special_tokens(config: Mapping[str, Json]) -> dict[str, str]:
    """bos_token, eos_token and so on, each as the text that a template writes."""
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[name] = content
    return found
