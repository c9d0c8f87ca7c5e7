"""Constrained decoding with llguidance: decides which tokens may come next.

A constraint is compiled when its request arrives, by the thread that reads the request, so that an invalid
one is refused with a reason; every answer gets its own matcher. Checking one token is cheap, so a sampled
token is checked first. A mask over all tokens is computed if the sampled token violates the constraint. Where
that is likely, the mask is computed before sampling instead: while the grammar is still in the CPU's caches,
and so that the library can apply it to the logits.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from mlcbuild_format.errors import RequestError, StoppingError

from mlcbuild_runtime.constraints import guidance
from mlcbuild_runtime.constraints.guidance import GROWTH, MaskTime, Tokens, reason
from mlcbuild_runtime.constraints.lark import Constraint, Kind, in_lark
from mlcbuild_runtime.constraints.stages import Trials
from mlcbuild_runtime.constraints.trial import TrialOutcome
from mlcbuild_runtime.executor.batch import Mask
from mlcbuild_runtime.text.freed_memory import give_back
from mlcbuild_runtime.text.turns import CrowdedError
from mlcbuild_runtime.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Key = tuple[Kind, str, bool]
KEPT_BYTES = 320 << 20
"""Maximum bytes of memory, as estimated, of all compiled constraints in the cache together; beyond it the
least recently used ones are dropped. They are cached because clients send the same ones repeatedly."""
MAX_SOURCE = 1 << 18
"""Maximum length of a constraint in characters; a longer one is refused."""
_WORTH = 2
"""Minimum number of bytes that a constraint must force next in an answer before the tokens that spell them
are computed. One byte hardly ever determines a token, because longer tokens may begin with it."""


class Matcher:
    """The state of one answer that must match a constraint (JSON schema, regular expression or grammar):
    decides which tokens may come next. Its methods and properties raise RequestError, which must end the
    answer, if the constraint is too costly to follow, or if a token was appended that it does not allow."""

    def __init__(self, of: Compiled, matcher: LLMatcher) -> None:
        # Attribute order matters: the matcher must be freed before the one that it was copied from.
        self._told, self._of = matcher, of
        self._owed: list[int] = []
        """Accepted tokens of the answer that llguidance's matcher has not consumed yet."""
        self._mask: Mask | None = None
        """Logit mask, int32 words with one bit per token, 1 if it is allowed, of the next token of the
        answer; None until it is needed."""
        self._spelled: int | None = None
        """Number of bytes that the constraint forces next in the answer; None until it is computed."""
        self._tried: int | None = None
        """A sampled token that llguidance's matcher has already accepted and consumed, so that the next token
        that is appended to the answer must be this one; None if there is no such token."""
        self.finished = bool(matcher.is_stopped())
        """True if only an end-of-sequence token may follow."""
        self._time, self._count = MaskTime(), 0
        """The CPU time that logit masks of the answer have cost so far, as a `MaskTime` that also limits it;
        and the number of tokens of the answer so far."""

    def mask(self) -> Mask:
        """Returns the logit mask of the answer's next token: int32 words with one bit for each token of the
        vocabulary, lowest token first, set where the constraint allows the token. End-of-sequence tokens are
        allowed only where the text is complete. The mask is cached until the next token. Raises RequestError
        if the constraint is too costly to follow."""
        if self._mask is None:
            self._mask = self._bits()
        return self._mask

    @property
    def _matcher(self) -> LLMatcher:
        """Returns llguidance's matcher for the answer, after it has consumed all accepted tokens. Raises
        RequestError if the constraint is too costly to follow."""
        if self._owed:
            owed, self._owed = self._owed, []
            if not self._told.consume_tokens(owed):
                self._check()
        return self._told

    @property
    def free(self) -> bool:
        """Returns False if the constraint forces the next byte of the answer: then only the tokens by which
        the tokenizer itself would spell the forced text are allowed. Else returns True."""
        return self._bytes_ahead == 0

    @property
    def _bytes_ahead(self) -> int:
        if self._spelled is None:
            self._spelled = len(self._matcher.compute_ff_bytes())
        return self._spelled

    def tries(self, token: int) -> bool:
        """Returns True if the constraint allows a token next. llguidance's matcher has consumed the token
        then, and the caller must append it to the answer with the method `take`. On False nothing changes.
        This is much cheaper than a mask.

        Must be called only if the constraint forces no next byte (`free` is True). Returns False for
        end-of-sequence tokens, even where the mask allows them.
        """
        if token in self._of.ends:
            return False
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tried, self._mask, self._spelled = token, None, None
        return True

    def _bits(self) -> Mask:
        begun = time.thread_time()
        matcher, ends = self._matcher, self._of.ends
        bits: bytes | bytearray = matcher.compute_bitmask()
        if slow := self._time.add(time.thread_time() - begun, self._count):
            raise self._failed(slow)
        self._check()
        if len(ends) > 1 and any(bits[end >> 3] >> (end & 7) & 1 for end in ends):
            bits = bytearray(bits)
            for end in ends:  # if one end-of-sequence token is allowed, all are
                bits[end >> 3] |= 1 << (end & 7)
        return np.frombuffer(bits, np.int32)

    def take(self, token: int) -> None:
        """Appends a token to the answer, usually one sampled under the mask. Directly after `tries` has
        returned True, it must be the token that was tried. Raises RequestError if the constraint does not
        allow the token, or is too costly to follow."""
        self._count += 1
        if self._tried is None:
            self._mask = self._spelled = None
            self._owed.append(token)
        else:
            assert token == self._tried
            self._tried = None
        self.finished = bool(self._matcher.is_stopped())

    @property
    def forces(self) -> bool:
        """Returns True if the constraint allows only one continuation for at least the next two bytes of the
        answer.
        """
        return self._bytes_ahead >= _WORTH

    def forced(self, count: int) -> list[int]:
        """Returns up to `count` tokens that spell the bytes which the constraint forces next, without
        appending them to the answer; [] if they are fewer than two bytes, or if the tokenizer would add a
        space that the constraint does not allow."""
        if not self.forces:
            return []
        tokens = [int(token) for token in self._matcher.compute_ff_tokens()[:count]]
        return tokens[: self.accepted(tokens)]

    def accepted(self, tokens: Sequence[int]) -> int:
        """Returns how many tokens from the beginning of `tokens` the constraint allows next in the answer,
        one after the other. The state does not change."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def after(self, tokens: Sequence[int]) -> Matcher:
        """Returns a copy of this state of an answer and its constraint, to which `tokens` are appended. The
        original does not change. Raises RequestError if the constraint does not allow the tokens, or is too
        costly to follow."""
        other = Matcher(self._of, self._matcher.deep_copy())
        other._time, other._count = replace(self._time), self._count
        for token in tokens:
            other.take(token)
        return other

    def _check(self) -> None:
        """Raises RequestError, and removes the constraint from the cache, if llguidance's matcher has stopped
        with an error: at one of its limits, or at a token that the constraint does not allow."""
        if self._told.is_error():
            raise self._failed(reason(self._told.get_error()))

    def _failed(self, why: str) -> RequestError:
        """Removes the constraint of the answer from the server's cache of compiled constraints, because it
        cannot be followed, and returns the RequestError that the caller must raise to end the answer. why:
        the reason, for the message."""
        self._of.forget()
        return RequestError(f"the constraint cannot be followed: {why}", code="invalid_constraint")


class Compiled:
    """A compiled constraint (JSON schema, regular expression or grammar) that any number of answers may
    follow at a time; they share the states of llguidance's lexer."""

    def __init__(
        self, matcher: LLMatcher, ends: Collection[int], bytes: int, forget: Callable[[], None]
    ) -> None:
        """Creates a compiled constraint. matcher: llguidance's matcher at the beginning of an answer; ends:
        IDs of the end-of-sequence tokens; bytes: estimated maximum of the memory that it takes, for the
        cache; forget: function without arguments that is called when an answer cannot follow the constraint,
        and removes it from the cache."""
        self._matcher, self.ends, self.bytes, self.forget = matcher, ends, bytes, forget

    def __del__(self) -> None:
        del self._matcher
        give_back()

    def matcher(self) -> Matcher:
        """Returns a new matcher, which decides token by token what the constraint allows in one answer."""
        return Matcher(self, self._matcher.deep_copy())


class Grammars:
    """Compiles the constraints that requests state (JSON schemas, regular expressions and Lark grammars) for
    the tokens of one model, and caches the compiled ones. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Collection[int]) -> None:
        """Creates an empty cache of compiled constraints for a model. vocabulary: the texts of its tokens;
        size: number of its tokens, each of which has one bit in a logit mask; ends: IDs of the
        end-of-sequence tokens."""
        self._vocabulary, self._size, self._ends = vocabulary, size, frozenset(ends)
        self._compiling: dict[Key, Future[Compiled | str]] = {}
        """Constraint -> future with its compiled form or an error message, for the constraints that a thread
        is compiling now."""
        self._kept: OrderedDict[Key, Compiled] = OrderedDict()
        self._lock, self._first, self._closed = threading.Lock(), threading.Lock(), False

    def compiled(self, constraint: Constraint, message: bool) -> Compiled:
        """Returns the compiled constraint: from the cache, or from another thread that compiles the same one
        already, or newly compiled.

        Raises RequestError, with the reason, if it cannot be compiled, if the model has no end-of-sequence
        token, or if too many others wait or the server is stopping (status 503), and SetupError if no child
        process can be started to try it. `message` is true if the answer is a whole message: where the
        tokenizer puts a space before a text, such an answer may begin with one, which is not part of the
        text.
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
        """Ends the child processes in which constraints are tried before they are compiled; later constraints
        that are not cached are refused, because the server is stopping. Any thread may call it."""
        with self._first:
            self._closed = True
            if "_trials" in self.__dict__:
                self._trials.close()

    def _outcome(self, constraint: Constraint, key: Key) -> Compiled | str:
        """Returns the compiled form of `constraint`, from the cache if possible, or an error message if it
        cannot be compiled. If another thread is compiling the same constraint, waits for its result. key: the
        constraint's key in the cache. Raises RequestError if too many constraints wait or the server is
        stopping, SetupError if no child process can be started."""
        with self._lock:
            cached = self._kept.get(key)
            if cached is not None:
                self._kept.move_to_end(key)
                return cached
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
        """Adds a compiled constraint to the cache, whose lock the caller holds. Returns the least recently
        used constraints that the cache drops to stay within KEPT_BYTES, for the caller to free outside of the
        lock."""
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
        self._trials.forget(key)
        del dropped

    def _compile(self, constraint: Constraint, key: Key) -> Compiled | str:
        """Compiles a constraint after a trial in a child process, without adding it to the cache, and returns
        it, or an error message if it cannot be compiled or is longer than MAX_SOURCE characters. key: the key
        under which the caller caches it. Raises RequestError (503) if too many constraints wait or the server
        is stopping, and SetupError if no child process can be started."""
        if (size := len(constraint.source)) > MAX_SOURCE:
            return f"it has {size} characters, and at most {MAX_SOURCE} are accepted"
        grammar = in_lark(constraint, key[2])
        with self._first:
            if self._closed and "_trials" not in self.__dict__:
                raise StoppingError  # Closed trials still have the outcomes that they have cached.
            trials = self._trials
        try:
            return trials.passed(key, grammar, lambda outcome: self._made(grammar, key, outcome))
        except CrowdedError:
            raise RequestError(
                f"{constraint.param} waits for other constraints that take long to compile: try again later",
                param=constraint.param,
                code="overloaded",
                status=503,
            ) from None

    def _made(self, grammar: str, key: Key, outcome: TrialOutcome) -> Compiled | str:
        """Compiles a constraint, such as a JSON schema, after it was compiled on trial in a child process.
        Returns it, or an error message if it cannot be used; does not add it to the cache. outcome: the bytes
        of memory that the trial took; key: the constraint's key in the cache, from which it is removed if an
        answer cannot follow it."""
        with self._first:
            tokenizer = self._tokenizer
        matcher = guidance.matcher(tokenizer, grammar)
        if fault := guidance.beginning(matcher):
            return reason(fault)
        used_bytes = outcome.bytes + sys.getsizeof(grammar) + GROWTH
        return Compiled(matcher, self._ends, used_bytes, partial(self._forget, key))

    @cached_property
    def _trials(self) -> Trials[Compiled]:
        return Trials(self._tokens)

    @cached_property
    def _tokens(self) -> _Tokens:
        return _Tokens(self._vocabulary, self._size, self._ends)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Returns the vocabulary as llguidance's tokenizer object; it is created for the first constraint."""
        return self._tokens.tokenizer()


class _Tokens(Tokens):
    """A vocabulary in llguidance's form that tokenizes texts with the model's own tokenizer."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Collection[int]) -> None:
        texts = [vocabulary.token_bytes(token) for token in range(size)]
        # llguidance marks special tokens with byte 255, which no text contains: it must not be a token.
        special = [token for token, data in enumerate(texts) if not data or data == b"\xff"]
        for token in special:
            texts[token] = f"<{token} {vocabulary.token_name(token)}>".encode()
        super().__init__(texts, special, ends)
        self._vocabulary, self._special = vocabulary, frozenset(special)

    def __call__(self, text: str) -> list[int]:
        tokens = self._vocabulary.encode(text, special=False)
        # A text that spells the name of a special token does not stand for that token.
        return tokens if self._special.isdisjoint(tokens) else super().__call__(text)
