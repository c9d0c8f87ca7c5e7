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
from collections.abc import Collection, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from mlcbuild_runtime import trial
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.places import Place, Places, places
from mlcbuild_runtime.step import Mask
from mlcbuild_runtime.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json_schema", "regex", "lark"]
KEPT = 64
"""Compiled constraints that are kept: clients send the same ones again and again."""
STEP_SECONDS = 0.25
"""Of processor time that a mask may take: all requests of a step wait for it."""
MAX_SOURCE = 1 << 18
"""Characters of a constraint."""
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

    def __init__(
        self, matcher: LLMatcher, ends: Collection[int], at: Place | None = None, texts: Sequence[bytes] = ()
    ) -> None:
        """at: where an answer begins, if that is known; `texts` of all tokens, then."""
        self._told, self._ends, self._place, self._texts = matcher, ends, at, texts
        self._owed: list[int] = []
        """Tokens that were taken, of which llguidance has not been told."""
        self._mask: Mask | None = None
        """Of the next token."""
        self._spelled: int | None = None
        """Bytes that must come next."""
        self._wanted = set[Hashable]()
        """Kinds of places at which a mask was."""
        self._tried: int | None = None
        """A token that was taken before anyone said so."""
        self.finished = bool(matcher.is_stopped())
        """Nothing but an end token may follow."""

    def mask(self) -> Mask:
        """Tokens that may come next; an end token only where the text is complete. To ask again costs nothing
        before the next token is taken, or at the same place. Raises RequestError when the constraint is too
        costly to follow."""
        if self._mask is None:
            place = self._place
            self._mask = None if place is None else place.mask
            if self._mask is None:
                self._mask = self._bits()
                if place is not None:
                    place.keep(self._mask, self.free)
            if place is not None:
                self._wanted.add(place.kind)
        return self._mask

    @property
    def ready(self) -> bool:
        """A mask is at hand: this answer wanted the same one before."""
        return self._place is not None and self._place.kind in self._wanted

    @property
    def _matcher(self) -> LLMatcher:
        """After all tokens that were taken. Raises RequestError when the constraint is too costly to
        follow."""
        if self._owed:
            owed, self._owed = self._owed, []
            if not self._told.consume_tokens(owed):
                _check(self._told)
        return self._told

    @property
    def free(self) -> bool:
        """Texts that fit go on in several ways. Where there is one, only the tokenizer's way to spell it is
        in the mask."""
        return self._bytes_ahead == 0

    @property
    def _bytes_ahead(self) -> int:
        if self._spelled is None:
            place = self._place
            if place is None or place.ahead is None:
                self._spelled = len(self._matcher.compute_ff_bytes())
                if place is not None:
                    place.ahead = self._spelled
            else:
                self._spelled = place.ahead
        return self._spelled

    def tries(self, token: int) -> bool:
        """Whether a token is in the mask, where it is `free`; no end token is, here. It is taken next, if so:
        `take` has nothing more to do then. A mask costs much more."""
        if token in self._ends:
            return False
        known = None if self._place is None else self._place.mask
        if known is not None:
            return bool(known[token >> 5] >> (token & 31) & 1)
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tried, self._mask, self._spelled = token, None, None
        return True

    def _bits(self) -> Mask:
        matcher, begun = self._matcher, time.thread_time()
        bits: bytes | bytearray = matcher.compute_bitmask()
        if (seconds := time.thread_time() - begun) > STEP_SECONDS:
            raise RequestError(
                f"the constraint cannot be followed: it took {seconds:.2f} s to see which tokens may come"
                " next, and others wait meanwhile: simplify it",
                code="invalid_constraint",
            )
        _check(matcher)
        if len(self._ends) > 1 and any(bits[end >> 3] >> (end & 7) & 1 for end in self._ends):
            bits = bytearray(bits)
            for end in self._ends:  # one is as good as another
                bits[end >> 3] |= 1 << (end & 7)
        return np.frombuffer(bits, np.int32)

    def take(self, token: int) -> None:
        """The token that was chosen. Raises RequestError when the constraint is too costly to follow."""
        place = self._place
        if place is not None:
            place = self._place = None if token in self._ends else place.after(self._texts[token])
        if self._tried is None:
            self._mask = self._spelled = None
            self._owed.append(token)
        else:
            assert token == self._tried
            self._tried = None
        if place is None:
            self.finished = bool(self._matcher.is_stopped())
            return
        finished = place.finished
        if finished is None:
            finished = place.finished = bool(self._matcher.is_stopped())
        self.finished = finished

    @property
    def forces(self) -> bool:
        """Several bytes must come next."""
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
        other = Matcher(self._matcher.deep_copy(), self._ends, self._place, self._texts)
        other._wanted |= self._wanted
        for token in tokens:
            other.take(token)
        return other


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise RequestError(
            f"the constraint cannot be followed: {_line(matcher.get_error())}", code="invalid_constraint"
        )


class Compiled:
    """A constraint that any number of answers may follow."""

    def __init__(
        self, matcher: LLMatcher, ends: Collection[int], known: Places | None, texts: Sequence[bytes]
    ) -> None:
        self._matcher, self._ends, self._known, self._texts = matcher, ends, known, texts

    def matcher(self) -> Matcher:
        """For one answer."""
        start = None if self._known is None else self._known.start
        return Matcher(self._matcher.deep_copy(), self._ends, start, self._texts)


class Grammars:
    """Compiles constraints for one tokenizer. May be used from any thread."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Collection[int]) -> None:
        """`size`: of the model's vocabulary. `ends`: tokens that end an answer."""
        self._vocabulary, self._size, self._ends = vocabulary, size, frozenset(ends)
        self._kept: OrderedDict[tuple[Kind, str, bool], Future[Compiled | str]] = OrderedDict()
        """What became of a constraint, or why there is none."""
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
        return made

    def _compile(self, constraint: Constraint, space: bool) -> Compiled | str:
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
        if fault := trial.beginning(found):
            return _line(fault)
        tokens = self._tokens
        known = places(constraint.source, tokens.longest, space) if constraint.kind == "regex" else None
        return Compiled(found, self._ends, known, tokens.tokens)

    @cached_property
    def _tokens(self) -> _Tokens:
        return _Tokens(self._vocabulary, self._size, min(self._ends))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance takes it; made for the first constraint."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self._tokens), n_vocab=self._size, eos_token=sorted(self._ends))


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
        self.longest = max(map(len, self._numbers), default=1)

    def __call__(self, text: str) -> list[int]:
        found = self._vocabulary.encode(text, special=False)
        if self._special.isdisjoint(found):
            return found
        # The text spells a special token, which is not what it means: the longest tokens, one by one.
        data, place, found = text.encode(), 0, []
        while place < len(data):
            sizes = range(min(self.longest, len(data) - place), 0, -1)
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
