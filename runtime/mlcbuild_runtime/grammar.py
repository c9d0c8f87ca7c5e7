"""Constrained output: which tokens may come next, by llguidance.

A constraint is compiled when its request comes in, by the thread that reads the request, so that a wrong one
is refused with the reason, and every answer gets a matcher of its own. To ask about one token is cheap; a
mask of all tokens is computed where what the model wants does not fit, and before the model is asked where
that is to be expected: the caches still have the grammar then, and the library masks the logits itself.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from mlcbuild_runtime import trial
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.step import Mask
from mlcbuild_runtime.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Floats = NDArray[np.float32]
Kind = Literal["json_schema", "regex", "lark"]
KEPT = 64
"""Compiled constraints that are kept: clients send the same ones again and again."""
STEP_SECONDS = 0.25
"""Of processor time that a mask may take: all requests of a step wait for it."""
MAX_SOURCE = 1 << 18
"""Characters of a constraint."""
_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.bool_),
    np.float32(np.inf),
    np.float32(-np.inf),
)
"""For each byte of a mask, what the logits of its eight tokens may be at most. A table and a minimum take a
tenth of the time of choosing by bits."""
_MANY = 3
"""Where no more than one of so many bytes of a mask is set, to pick tokens one by one takes less time than a
pass over all, and to choose among them does, too."""
_FEW = 512
"""Tokens that begin one and the same text, at most: another one has to be longer. Where a mask has more,
nobody has to ask what must come next."""
_WORTH = 2
"""Bytes that must come next, at least, before it is asked which tokens spell them. One alone hardly ever is a
token: it may begin a longer one."""


@dataclass(frozen=True)
class Constraint:
    """What an answer must be: text that a JSON schema, a regular expression or a Lark grammar accepts."""

    kind: Kind
    source: str
    param: str
    """The field of the request that it came from."""


class Matcher:
    """One answer's way through a constraint."""

    def __init__(self, matcher: LLMatcher, ends: Collection[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self._room: Floats | None = None
        self._mask: Mask | None = None
        """Of the next token."""
        self._spelled: int | None = None
        """Bytes that must come next."""
        self._tried: int | None = None
        """A token that was taken before anyone said so."""
        self.finished = bool(matcher.is_stopped())
        """Nothing but an end token may follow."""

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """bool [size]: tokens that may come next; an end token only where the text is complete.
        Raises RequestError when the constraint is too costly to follow."""
        return np.unpackbits(self._bits(), count=size, bitorder="little").astype(np.bool_)

    def mask(self) -> Mask:
        """As `allowed`, in bits, from the lowest on. To ask again costs nothing before the next token is
        taken."""
        if self._mask is None:
            self._mask = self._bits().view(np.int32)
        return self._mask

    @property
    def free(self) -> bool:
        """Texts that fit go on in several ways. Where there is one, only the tokenizer's way to spell it is
        `allowed`."""
        return self._bytes_ahead == 0

    @property
    def _bytes_ahead(self) -> int:
        if self._spelled is None:
            self._spelled = len(self._matcher.compute_ff_bytes())
        return self._spelled

    def accepts(self, token: int) -> bool:
        """Whether a token is `allowed`, where it is `free`; no end token is, here. A mask costs much more."""
        return token not in self._ends and self.accepted([token]) == 1

    def tries(self, token: int) -> bool:
        """As `accepts`, for a token that is taken next, if so: `take` has nothing more to do then."""
        if token in self._ends or self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tried, self._mask, self._spelled = token, None, None
        return True

    def narrowed(self, logits: Floats) -> tuple[NDArray[np.intp] | None, Floats]:
        """Where few tokens are `allowed`, these in order and their logits; else None, and logits like those
        given with minus infinity for all others. Valid until the next call: memory that is new to the
        processor costs more than what is done with it."""
        bits = self.mask().view(np.uint8)
        places = bits.astype(np.bool_).nonzero()[0]
        if self._room is None:
            self._room = np.empty(8 * len(bits), np.float32)
        if 0 < len(places) <= len(bits) // _MANY:
            inside = np.unpackbits(bits[places], bitorder="little").view(np.bool_).nonzero()[0]
            tokens = places[inside >> 3] * 8 + (inside & 7)
            return tokens, logits[tokens]
        _CEILINGS.take(bits, axis=0, out=self._room.reshape(-1, 8), mode="clip")  # other modes make a copy
        ceiling = self._room[: len(logits)]
        return None, np.minimum(logits, ceiling, out=ceiling)

    def _bits(self) -> NDArray[np.uint8]:
        begun, matcher = time.thread_time(), self._matcher
        bits: bytes | bytearray = matcher.compute_bitmask()
        if (seconds := time.thread_time() - begun) > STEP_SECONDS:
            raise RequestError(
                f"the constraint cannot be followed: it took {seconds:.2f} s to see which tokens may come"
                " next, and others wait meanwhile: simplify it",
                code="invalid_constraint",
            )
        _check(matcher)
        if any(bits[end >> 3] >> (end & 7) & 1 for end in self._ends):  # one end is as good as another
            bits = bytearray(bits)
            for end in self._ends:
                bits[end >> 3] |= 1 << (end & 7)
        return np.frombuffer(bits, np.uint8)

    def take(self, token: int) -> None:
        """The token that was chosen. Raises RequestError when the constraint is too costly to follow."""
        tried, self._tried = self._tried, None
        if tried != token:
            assert tried is None
            self._mask = self._spelled = None
            if not self._matcher.consume_token(token):
                _check(self._matcher)
        self.finished = bool(self._matcher.is_stopped())

    @property
    def forces(self) -> bool:
        """Several bytes must come next."""
        if self._mask is not None and np.count_nonzero(self._mask) > _FEW:
            return False
        return self._bytes_ahead >= _WORTH

    def forced(self, count: int) -> list[int]:
        """Up to `count` tokens that spell what must come next: none where there is a choice, or where the
        tokenizer spells it with a space that must not be there."""
        if not self.forces:
            return []
        tokens = [int(token) for token in self._matcher.compute_ff_tokens()[:count]]
        return tokens[: self.accepted(tokens)]

    def accepted(self, tokens: Sequence[int]) -> int:
        """How many of the first `tokens` may come next, one after the other."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def after(self, tokens: Sequence[int]) -> Matcher:
        """Another matcher, which has taken `tokens`."""
        other = Matcher(self._matcher.deep_copy(), self._ends)
        for token in tokens:
            other.take(token)
        return other


class Trust:
    """Whether what the model wants is tried before a mask is computed: the rarer it fits, the rarer."""

    LONGEST = 16

    def __init__(self) -> None:
        self._pause = self._next = 0

    def due(self, place: int) -> bool:
        """`place`: of a token in the answer."""
        return place >= self._next

    def settle(self, place: int, fits: bool) -> None:
        self._pause = self._pause // 2 if fits else min(self.LONGEST, 2 * self._pause + 1)
        self._next = place if fits else place + 1 + self._pause


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise RequestError(
            f"the constraint cannot be followed: {_line(matcher.get_error())}", code="invalid_constraint"
        )


class Compiled:
    """A constraint that any number of answers may follow."""

    def __init__(self, matcher: LLMatcher, ends: Collection[int]) -> None:
        self._matcher, self._ends = matcher, ends

    def matcher(self) -> Matcher:
        """For one answer."""
        return Matcher(self._matcher.deep_copy(), self._ends)


class Grammars:
    """Compiles constraints for one tokenizer. May be used from any thread."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Collection[int]) -> None:
        """`size`: of the model's vocabulary. `ends`: tokens that end an answer."""
        self._vocabulary, self._size, self._ends = vocabulary, size, frozenset(ends)
        self._kept: OrderedDict[tuple[Kind, str, bool], Future[LLMatcher | str]] = OrderedDict()
        """What became of a constraint: a matcher at its start, or why there is none."""
        self._lock, self._first = threading.Lock(), threading.Lock()

    def compiled(self, constraint: Constraint, message: bool) -> Compiled:
        """Waits until the constraint is compiled; who asks for the same one waits with it. Raises
        RequestError, with the reason, for one that cannot be compiled.

        message: the answer is a whole message. Where the tokenizer puts a space before a text, the message
        may begin with one: it is no part of the text.
        """
        if not self._ends:
            raise RequestError(
                "the model has no end token, so that a constrained answer could not end",
                param=constraint.param,
            )
        space = message and self._vocabulary.leading_space
        key = constraint.kind, constraint.source, space
        with self._lock:
            found = self._kept.get(key)
            mine = found is None
            if found is None:
                found = self._kept[key] = Future()
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if mine:
            try:
                found.set_result(self._compile(constraint, space))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(key, None)
                found.set_exception(error)
        made = found.result()
        if isinstance(made, str):
            raise RequestError(
                f"{constraint.param} cannot be compiled: {made}",
                param=constraint.param,
                code="invalid_constraint",
            )
        return Compiled(made, self._ends)

    def _compile(self, constraint: Constraint, space: bool) -> LLMatcher | str:
        if (size := len(constraint.source)) > MAX_SOURCE:
            return f"it has {size} characters, and at most {MAX_SOURCE} are taken"
        grammar = _lark(constraint, space)
        try:
            fault = trial.TRIAL.error(grammar)
        except ValueError as error:
            return str(error)
        if fault:
            return _line(fault)
        with self._first:
            tokenizer = self._tokenizer
        found = trial.matcher(tokenizer, grammar)
        return _line(fault) if (fault := trial.beginning(found)) else found

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance takes it; made for the first constraint."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_Tokens(self._vocabulary, self._size, min(self._ends))),
            n_vocab=self._size,
            eos_token=sorted(self._ends),
        )


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary, size: int, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        self.tokens = [vocabulary.token_bytes(token) for token in range(size)]
        # Byte 255, which no text has, begins how special tokens are written there: it must not be a token.
        self.special_token_ids = [t for t, data in enumerate(self.tokens) if not data or data == b"\xff"]
        for token in self.special_token_ids:
            self.tokens[token] = f"<{token} {vocabulary.token_name(token)}>".encode()
        self._vocabulary, self._special = vocabulary, frozenset(self.special_token_ids)
        self._numbers = {data: t for t, data in enumerate(self.tokens) if t not in self._special}
        self._longest = max(map(len, self._numbers), default=1)

    def __call__(self, text: str) -> list[int]:
        found = self._vocabulary.encode(text, special=False)
        if self._special.isdisjoint(found):
            return found
        # The text spells a special token, which is not what it means: the longest tokens, one by one.
        data, place, found = text.encode(), 0, []
        while place < len(data):
            sizes = range(min(self._longest, len(data) - place), 0, -1)
            size = next((size for size in sizes if data[place : place + size] in self._numbers), 0)
            if not size:
                break  # what is left is chosen byte by byte
            found.append(self._numbers[data[place : place + size]])
            place += size
        return found


def _lark(constraint: Constraint, space: bool) -> str:
    """A constraint as a Lark grammar, in llguidance's dialect."""
    if constraint.kind == "lark":
        return constraint.source
    return f'start: " "? {in_lark(constraint)}' if space else f"start: {in_lark(constraint)}"


def in_lark(constraint: Constraint) -> str:
    """A schema or a regular expression as a part of a rule in Lark."""
    if constraint.kind == "json_schema":
        return f"%json {constraint.source}"
    return f"/{_slashes_escaped(constraint.source)}/"


def _slashes_escaped(regex: str) -> str:
    """Slashes end a regular expression in Lark; a line feed does, too."""
    text, escaped = "", False
    for letter in regex:
        text += "\\/" if letter == "/" and not escaped else "\\n" if letter == "\n" else letter
        escaped = letter == "\\" and not escaped
    return text


def _line(message: str) -> str:
    """The first line of a message: the others draw the place in a grammar that is ours."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error:")), "")
    first = re.sub(r"^at \d+\(\d+\): ", "", lines[0]) if lines else "unknown reason"
    shown = first if len(first) <= 300 else f"{first[:297]}..."  # it may quote a long constraint
    return f"{shown} {reason}".strip()
