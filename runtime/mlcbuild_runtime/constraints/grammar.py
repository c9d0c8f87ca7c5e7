"""Constrained output: which tokens may come next, by llguidance.

A constraint is compiled when its request comes in, by the thread that reads the request, so that a wrong one
is refused with the reason, and every answer gets a matcher of its own. To ask about one token is cheap; a
mask of all tokens is computed where what the model wants does not fit, and before the model is asked where
that is to be expected: the caches still have the grammar then, and the library masks the logits itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from mlcbuild_format.errors import RequestError

from mlcbuild_runtime.constraints import guidance, trial
from mlcbuild_runtime.constraints.guidance import GROWTH, STEP_SECONDS, Tokens, reason
from mlcbuild_runtime.constraints.trial import Outcome, TooCostlyError, Trial
from mlcbuild_runtime.executor.batch import Mask
from mlcbuild_runtime.text.memory import give_back
from mlcbuild_runtime.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json_schema", "regex", "lark"]
Key = tuple[Kind, str, bool]
KEPT_BYTES = 320 << 20
"""Memory of compiled constraints that are kept, as estimated: clients send the same ones again and again."""
TRIALS = 256
"""Constraints of which the outcome of the trial is kept, if they are short."""
SHORT = 1 << 12
"""Characters of a short constraint."""
QUICK, SLOW = 0.05, 2.0
"""Processor time, in seconds, of a constraint's first trial, and of the second one where that is not enough.
Most constraints take a few milliseconds, so that they never wait for one that takes long."""
WAITING = 3
"""Constraints that may wait for their second trial."""
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

    def __init__(self, of: Compiled, matcher: LLMatcher) -> None:
        # The matcher comes first, so that it is freed before what it was copied from.
        self._told, self._of = matcher, of
        self._owed: list[int] = []
        """Tokens that were taken, of which llguidance has not been told."""
        self._mask: Mask | None = None
        """Of the next token."""
        self._spelled: int | None = None
        """Bytes that must come next."""
        self._tried: int | None = None
        """A token that was taken before anyone said so."""
        self.finished = bool(matcher.is_stopped())
        """Nothing but an end token may follow."""

    def mask(self) -> Mask:
        """Tokens that may come next; an end token only where the text is complete. To ask again costs nothing
        before the next token is taken. Raises RequestError when the constraint is too costly to follow."""
        if self._mask is None:
            self._mask = self._bits()
        return self._mask

    @property
    def _matcher(self) -> LLMatcher:
        """After all tokens that were taken. Raises RequestError when the constraint is too costly to
        follow."""
        if self._owed:
            owed, self._owed = self._owed, []
            if not self._told.consume_tokens(owed):
                self._check()
        return self._told

    @property
    def free(self) -> bool:
        """Texts that fit go on in several ways. Where there is one, only the tokenizer's way to spell it is
        in the mask."""
        return self._bytes_ahead == 0

    @property
    def _bytes_ahead(self) -> int:
        if self._spelled is None:
            self._spelled = len(self._matcher.compute_ff_bytes())
        return self._spelled

    def tries(self, token: int) -> bool:
        """Whether a token is in the mask, where it is `free`; no end token is, here. It is taken next, if so:
        `take` has nothing more to do then. A mask costs much more."""
        if token in self._of.ends:
            return False
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tried, self._mask, self._spelled = token, None, None
        return True

    def _bits(self) -> Mask:
        matcher, ends, begun = self._matcher, self._of.ends, time.thread_time()
        bits: bytes | bytearray = matcher.compute_bitmask()
        if (seconds := time.thread_time() - begun) > STEP_SECONDS:
            raise self._failed(guidance.slow_mask(seconds))
        self._check()
        if len(ends) > 1 and any(bits[end >> 3] >> (end & 7) & 1 for end in ends):
            bits = bytearray(bits)
            for end in ends:  # one is as good as another
                bits[end >> 3] |= 1 << (end & 7)
        return np.frombuffer(bits, np.int32)

    def take(self, token: int) -> None:
        """The token that was chosen. Raises RequestError when the constraint is too costly to follow."""
        if self._tried is None:
            self._mask = self._spelled = None
            self._owed.append(token)
        else:
            assert token == self._tried
            self._tried = None
        self.finished = bool(self._matcher.is_stopped())

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
        other = Matcher(self._of, self._matcher.deep_copy())
        for token in tokens:
            other.take(token)
        return other

    def _check(self) -> None:
        """Raises RequestError where llguidance has given up."""
        if self._told.is_error():
            raise self._failed(reason(self._told.get_error()))

    def _failed(self, why: str) -> RequestError:
        """Forgets the constraint, with its memory, and returns the error."""
        self._of.forget()
        return RequestError(f"the constraint cannot be followed: {why}", code="invalid_constraint")


class Compiled:
    """A constraint that any number of answers may follow. These share what its lexer has built."""

    def __init__(
        self, matcher: LLMatcher, ends: Collection[int], bytes: int, forget: Callable[[], None]
    ) -> None:
        """`bytes`: memory that it may take. `forget`: is called when it cannot be followed."""
        self._matcher, self.ends, self.bytes, self.forget = matcher, ends, bytes, forget

    def __del__(self) -> None:
        del self._matcher
        give_back()

    def matcher(self) -> Matcher:
        """For one answer."""
        return Matcher(self, self._matcher.deep_copy())


class Grammars:
    """Compiles constraints for one tokenizer. May be used from any thread."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Collection[int]) -> None:
        """`size`: of the model's vocabulary. `ends`: tokens that end an answer."""
        self._vocabulary, self._size, self._ends = vocabulary, size, frozenset(ends)
        self._compiling: dict[Key, Future[Compiled | str]] = {}
        """Constraints that are compiled at this moment."""
        self._kept: OrderedDict[Key, Compiled] = OrderedDict()
        self._outcomes: OrderedDict[Key, Outcome] = OrderedDict()
        """Constraint -> what its trial has shown."""
        self._lock, self._first = threading.Lock(), threading.Lock()
        self._slow_places = threading.BoundedSemaphore(WAITING)

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
        outcome = self._outcome(constraint, (constraint.kind, constraint.source, space))
        if isinstance(outcome, str):
            raise RequestError(
                f"{constraint.param} cannot be compiled: {outcome}",
                param=constraint.param,
                code="invalid_constraint",
            )
        return outcome

    def close(self) -> None:
        """Ends what is tried, from any thread."""
        with self._first:
            for each in self.__dict__.get("_trials", ()):
                each.close()

    def _outcome(self, constraint: Constraint, key: Key) -> Compiled | str:
        """Returns the compiled constraint, or why there is none; from those that are kept, if it is one."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            waiting = self._compiling.get(key)
            if waiting is None:
                mine = self._compiling[key] = Future()
        if waiting is not None:
            return waiting.result()
        try:
            outcome = self._compile(constraint, key)
        except BaseException as error:
            with self._lock:
                del self._compiling[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._compiling[key]
            dropped = [] if isinstance(outcome, str) else self._keep(key, outcome)
        mine.set_result(outcome)
        del dropped  # outside of the lock: this may free memory
        return outcome

    def _keep(self, key: Key, compiled: Compiled) -> list[Compiled]:
        """Keeps a constraint; returns those that there is no room for any more."""
        self._kept[key] = compiled
        dropped, total = [], sum(each.bytes for each in self._kept.values())
        while total > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            total -= oldest.bytes
            dropped.append(oldest)
        return dropped

    def _forget(self, key: Key) -> None:
        with self._lock:
            dropped = self._kept.pop(key, None)
            self._outcomes.pop(key, None)
        del dropped

    def _compile(self, constraint: Constraint, key: Key) -> Compiled | str:
        if (size := len(constraint.source)) > MAX_SOURCE:
            return f"it has {size} characters, and at most {MAX_SOURCE} are taken"
        grammar = _lark(constraint, key[2])
        try:
            outcome = self._outcomes.get(key) or self._tried(grammar, constraint.param)
        except TooCostlyError:
            most = f"{SLOW:g} s or {trial.MEMORY >> 20} MiB"
            outcome = Outcome(f"it takes more than {most} to compile and begin: simplify it", 0)
        if len(constraint.source) <= SHORT:
            with self._lock:
                self._outcomes[key] = outcome
                self._outcomes.move_to_end(key)
                while len(self._outcomes) > TRIALS:
                    self._outcomes.popitem(last=False)
        if outcome.error:
            return outcome.error
        with self._first:
            tokenizer = self._tokenizer
        matcher = guidance.matcher(tokenizer, grammar)
        if fault := guidance.beginning(matcher):
            return reason(fault)
        taken = outcome.bytes + sys.getsizeof(constraint.source) + GROWTH
        return Compiled(matcher, self._ends, taken, partial(self._forget, key))

    def _tried(self, grammar: str, param: str) -> Outcome:
        """Raises TooCostlyError, SetupError, or RequestError (503) where too many wait."""
        with self._first:
            quick, slow = self._trials
        try:
            return quick.run(grammar)
        except TooCostlyError:
            if not self._slow_places.acquire(blocking=False):
                raise RequestError(
                    f"{param} takes long to compile, and {WAITING} others that do are waiting: try later",
                    param=param,
                    code="overloaded",
                    status=503,
                ) from None
            try:
                return slow.run(grammar)
            finally:
                self._slow_places.release()

    @cached_property
    def _trials(self) -> tuple[Trial, Trial]:
        return Trial(self._tokens, QUICK), Trial(self._tokens, SLOW, niceness=10)

    @cached_property
    def _tokens(self) -> _Tokens:
        return _Tokens(self._vocabulary, self._size, self._ends)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance takes it; made for the first constraint."""
        return self._tokens.tokenizer()


class _Tokens(Tokens):
    """A vocabulary as llguidance expects one, with the model's own way to cut a text."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Collection[int]) -> None:
        texts = [vocabulary.token_bytes(token) for token in range(size)]
        # Byte 255, which no text has, begins how special tokens are written there: it must not be a token.
        special = [token for token, data in enumerate(texts) if not data or data == b"\xff"]
        for token in special:
            texts[token] = f"<{token} {vocabulary.token_name(token)}>".encode()
        super().__init__(texts, special, ends)
        self._vocabulary, self._special = vocabulary, frozenset(special)

    def __call__(self, text: str) -> list[int]:
        tokens = self._vocabulary.encode(text, special=False)
        # A text that spells a special token does not mean that token.
        return tokens if self._special.isdisjoint(tokens) else super().__call__(text)


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
