"""Converts prompts to tokens, and the tokens of answers to text as they arrive."""

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
"""Names of the files of a bundle or checkpoint from which a tokenizer is read."""
MAX_CONFIG = 32 << 20
"""Maximum bytes of tokenizer_config.json, which may list every token."""


class Tokenizer:
    """The tokenizer of a bundle or of a checkpoint's directory: vocabulary, chat template, BOS and
    end-of-sequence tokens. It converts texts and chats to tokens, and tokens to text."""

    def __init__(
        self, vocabulary: Vocabulary, template: ChatTemplate, bos: int | None, eos: Iterable[int]
    ) -> None:
        """Creates a tokenizer from its parts. template: the chat template; bos: number of the token that
        begins a prompt, None for none; eos: numbers of the end-of-sequence tokens."""
        self.vocabulary, self.template, self.bos, self.eos = vocabulary, template, bos, frozenset(eos)

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Tokenizer:
        """Returns the tokenizer of the bundle in directory `path`, from the files that its manifest lists.

        Untrusted files may end the process: mlcbuild_runtime.untrusted tries them in a child process first.
        Raises BundleError for missing or damaged files.
        """
        tokenizer = cls.load(path, manifest.serving, manifest.files)
        tokenizer.eos = frozenset(token for token in tokenizer.eos if token < manifest.vocab_size)
        return tokenizer

    @classmethod
    def load(
        cls, path: Path, serving: Serving | None = None, names: Collection[str] | None = None
    ) -> Tokenizer:
        """Returns the tokenizer whose files are in directory `path`. Raises BundleError for missing or
        damaged files.

        serving: special tokens that a bundle states, None for none: its BOS, if any, replaces the
        tokenizer's, and a message ends at each of its end-of-sequence tokens and at the tokenizer's own
        eos_token. names: the files that may be read; None for all files of a tokenizer that exist.
        """
        serving = serving or Serving()
        allowed = FILES if names is None else [name for name in FILES if name in names]
        present = {name for name in allowed if (path / name).is_file()}
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
        """Returns the tokens of a prompt, with BOS where the tokenizer adds one; a BOS in the text is not
        doubled. Raises RequestError for a text of more than `longest` bytes (None: no limit), or one that the
        tokenizer cannot read."""
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
        """Returns the tokens of the prompt for an answer to `messages`. options: more variables for the chat
        template. Raises RequestError if there is no template, if it refuses the messages or fails, if too
        many requests wait for it (503), or for a prompt of more than `longest` bytes (None: no limit),
        SetupError if no child process can be started to render it."""
        return self.vocabulary.encode(self.rendered(messages, options, longest), special=False)

    def rendered(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Json] | None = None,
        longest: int | None = None,
    ) -> str:
        """Returns the text of the prompt for an answer to `messages`, with all special tokens, which the chat
        template writes itself. options: more variables for the template. Raises RequestError if there is no
        template, if it refuses the messages or fails, if too many requests wait for it (503), or for a prompt
        of more than `longest` bytes (None: no limit), SetupError if no child process can be started to render
        it."""
        text = self.template.render(messages, options or {})
        check_length(text, longest)
        return text

    def stream(
        self, stop: Sequence[str] = (), message: bool = False, shown: Mapping[int, str] | None = None
    ) -> TextStream:
        """Returns a converter from the tokens of one answer to text. stop: texts at which the answer ends;
        message: True for a whole message, which loses the space that some tokenizers put first, False for the
        continuation of a text; shown: number of a special token -> text that stands for it, while other
        special tokens have no text."""
        return TextStream(self.vocabulary, stop, message and self.vocabulary.leading_space, shown)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of a whole sequence of tokens, without special tokens and without the space that
        some tokenizers put first. Invalid UTF-8 becomes U+FFFD."""
        stream = self.stream(message=True)
        return "".join([*(stream.push(token) for token in tokens), stream.finish()])

    def offsets(self, tokens: Iterable[int]) -> list[int]:
        """Returns for each token the index of the character at which its text begins in the decoded text of
        all tokens. A token with part of a character has that character's index."""
        stream, sizes = self.stream(message=True), [0]
        for token in tokens:
            sizes.append(len(stream.push(token)))
        return list(accumulate(sizes[:-1]))


def check_length(text: str, longest: int | None) -> None:
    """Raises RequestError for a text of more than `longest` bytes; None means no limit. Tokenizing a megabyte
    takes a second."""
    if longest is not None and len(text) * 4 > longest and (size := len(text.encode())) > longest:
        raise RequestError(
            f"the prompt has {size} bytes, and the context has no room for more than {longest}: shorten it",
            code="context_length_exceeded",
        )


class TextStream:
    """Converts tokens to text piece by piece, never splitting a character or emitting part of a stop
    string."""

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
        """True after a stop string has appeared, after which no more text follows."""

    def push(self, token: int) -> str:
        """Adds a token of the answer, and returns the new text that is certain, possibly "": later tokens
        cannot change it. After a stop string it returns ""."""
        shown = self._shown.get(token)
        data = self._vocabulary.token_bytes(token) if shown is None else shown.encode()
        return self._take(self._decoder.decode(data))

    def finish(self) -> str:
        """Returns the text that was held back when the last token arrived; "" after a stop string. An
        unfinished character becomes U+FFFD."""
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
        # The stop string that is complete first counts, however the tokens split the text.
        ends = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest prefix of the stop string `stop`, shorter than all of it, with which
    `text` ends; 0 if there is none."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _object(path: Path, name: str, present: Collection[str]) -> dict[str, Json]:
    return files.read_json(path / name, MAX_CONFIG) if name in present else {}


def _special_tokens(config: Mapping[str, Json]) -> dict[str, str]:
    """Returns name (bos_token, eos_token, ...) -> the text of that special token, from a tokenizer's
    config."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens
