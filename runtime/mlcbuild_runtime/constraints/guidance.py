"""Configures the library llguidance for this server: limits, the vocabulary in its form, and its errors in
plain words.

The server and the child process that compiles constraints on trial both use this module, so that they agree.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STEP_SECONDS = 0.25
"""Maximum CPU seconds for computing one logit mask, because all requests of a decode step wait for it; beyond
it the answer ends with an error. The slowest mask of each answer is exempt."""
TOKEN_SECONDS = 0.02
"""Maximum CPU seconds, per token of an answer, for computing logit masks, without the slowest one; each
answer may use STEP_SECONDS (0.25 s) in addition, and ends with an error beyond that. With a vocabulary of
150,000 tokens, a mask of an ordinary schema takes less than one millisecond."""
EXPRESSIONS, FUEL, STATES = 100_000, 50_000, 10_000
"""Limits of llguidance's lexer, in this order: the number of expressions that it may build for one
constraint, the work that it may do for one token (llguidance's fuel), and the number of its states. A
constraint that exceeds one is refused, or ends its answer with an error. With llguidance's defaults a matcher
may grow to 400 MB; with these limits, to 34 MB."""
GROWTH = 34 << 20
"""Maximum bytes by which a compiled constraint grows while answers follow it, which the cache counts for each
constraint in advance: 21 MB of expressions and 12 MB of states were measured with llguidance 1.9."""
_LIMITS = (
    "too many expressions",
    "too many states",
    "initial lexer configuration",
    "fuel",
    "Current row has",
    "Too many",
    "too many",
    "TooComplex",
)
"""Phrases in llguidance's errors that mean that a constraint has reached a limit."""
_EMPTY = (
    "no text fits it: its conditions exclude each other, a rule or $ref leads to nothing but itself, or the"
    " vocabulary cannot spell the text"
)


class Tokens:
    """A vocabulary in the form that llguidance requires. A call with a text returns the IDs of its tokens, at
    each place the longest one that matches, up to the first byte that no token spells."""

    def __init__(self, tokens: Sequence[bytes], special: Collection[int], ends: Collection[int]) -> None:
        """Creates the vocabulary. tokens: for each token ID its bytes, for a special token its name as bytes;
        special: IDs of the special tokens; ends: IDs of the end-of-sequence tokens, at least one."""
        self.tokens, self.special_token_ids, self.ends = list(tokens), sorted(special), sorted(ends)
        self.eos_token_id, self.bos_token_id = self.ends[0], None
        texts = set(range(len(self.tokens))) - set(special)
        self._numbers = {self.tokens[token]: token for token in sorted(texts)}
        self.longest = max(map(len, self._numbers), default=1)

    def __call__(self, text: str) -> list[int]:
        data, place, cut = text.encode(), 0, list[int]()
        while place < len(data):
            sizes = range(min(self.longest, len(data) - place), 0, -1)
            size = next((size for size in sizes if data[place : place + size] in self._numbers), 0)
            if not size:
                break  # llguidance spells the rest byte by byte.
            cut.append(self._numbers[data[place : place + size]])
            place += size
        return cut

    @cached_property
    def ordinary(self) -> NDArray[np.bool_]:
        """Returns a boolean for each token of the vocabulary: True for a token of text, False for a special
        or an end-of-sequence token."""
        marks = np.ones(len(self.tokens), np.bool_)
        marks[[*self.special_token_ids, *self.ends]] = False
        return marks

    @cached_property
    def plain(self) -> NDArray[np.bool_]:
        """Returns a boolean for each token of the vocabulary: True if its bytes are only ASCII letters and
        digits, and it is no special or end-of-sequence token."""
        return self.ordinary & [data.isalnum() for data in self.tokens]

    def tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self.ends)


def matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Returns llguidance's matcher for a Lark grammar. For an invalid grammar, the matcher's methods
    `is_error` and `get_error` report the error."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=EXPRESSIONS, step_lexer_fuel=FUEL, max_lexer_states=STATES, verbose_errors=False
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def beginning(matcher: LLMatcher) -> str:
    """Returns the error that llguidance reports for a new matcher or for its first mask; "" if there is none.
    A grammar that allows no first token is an error, too."""
    if not matcher.is_error() and not any(matcher.compute_bitmask()) and not matcher.is_error():
        return "NoExtensionBias"
    return str(matcher.get_error()) if matcher.is_error() else ""


@dataclass
class MaskTime:
    """Limits the CPU time for computing the logit masks of one answer: an answer must end when one mask takes
    more than 0.25 s, or all of them together more than 0.25 s plus 0.02 s for each token of the answer so
    far. The slowest mask does not count for either limit, because on a loaded machine a thread may be charged
    with other work."""

    slowest: float = 0.0
    others: float = 0.0
    """CPU seconds of all logit masks of an answer except the slowest one."""

    def add(self, seconds: float, tokens: int) -> str:
        """Adds the CPU seconds of one logit mask to those of the answer, and compares the sums with their
        limits. Returns an error message if the answer must end because its masks cost too much, "" if it may
        continue. tokens: number of tokens of the answer so far."""
        counted, self.slowest = sorted((seconds, self.slowest))
        self.others += counted
        if counted > STEP_SECONDS:
            return _slow_mask(counted)
        return _slow_mask(self.others, tokens) if self.others > STEP_SECONDS + tokens * TOKEN_SECONDS else ""


def _slow_mask(seconds: float, tokens: int = 1) -> str:
    """Returns a sentence that says why an answer ends whose constraint was too slow: computing the logit
    masks of `tokens` tokens took `seconds` of CPU time."""
    which = "tokens may come next" if tokens < 2 else f"of the tokens may come next {tokens} times"
    return f"it took {seconds:.2f} s to see which {which}, and others wait meanwhile: simplify it"


def reason(message: str) -> str:
    """Returns an error message of llguidance in plain words, as one line."""
    if message.startswith("NoExtension") or "forced bytes" in message:
        return _EMPTY
    if any(words in message for words in _LIMITS):
        return f"it is too complex, since it repeats or branches too often: simplify it ({_line(message)})"
    if name := re.search(r'unknown special token: ("[^"\n]*")', message):
        return f"no special token is called {name[1]}: write one by its number, such as <[2]>"
    if message.startswith("panic"):
        return f"llguidance cannot read it: {_line(message)}"
    return _line(message)


def _line(message: str) -> str:
    """Returns the first line of an error message of llguidance, without a place such as "at 1(7): " and cut
    to 300 characters; after it, behind a space, the first line that begins with "error:", if any. The other
    lines quote a grammar that the client did not write."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines() if line.strip()]
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")
    first = re.sub(r"^at \d+\(\d+\): ", "", lines[0]) if lines else "unknown reason"
    shown = first if len(first) <= 300 else f"{first[:297]}..."  # it may quote a long constraint
    return f"{shown} {reason}".strip()
