"""Decides how many prompt tokens the engine computes between two decode steps (a turn), and of which prompts.

Running answers get their next tokens between two turns, and prompts that arrive wait for the end of the
current turn. The policy has three rules, whose effect on slow, medium and fast machines `ci/bench/turns`
simulates:

- While more than one request runs, a turn takes about `TURN_SECONDS`, estimated from the speed of the turn
  before it. A fixed number of tokens that suits a fast machine would stall answers for a third of a second on
  a slow one.
- The oldest prompt of the highest priority gets half of each turn, so it takes at most twice as long as
  alone, whatever else arrives.
- The other half goes, in the order of priorities, to the prompts with the fewest tokens left: a short prompt
  overtakes long ones, which minimizes the mean time to the first token (shortest remaining processing time
  first; Schrage, 1968).
"""

from __future__ import annotations

from collections.abc import Sequence

TURN_SECONDS = 0.25
"""Seconds that the engine computes prompts between two decode steps (one turn) while other requests run.
`ci/bench/turns`: at 850 prompt tokens/s, 0.15 s instead of this value lets 16 clients that come at once wait
12 % longer for their first tokens (p90), since more decode steps come in between."""
ROW_MULTIPLE = 16
"""While other requests run, the maximum number of prompt tokens between two decode steps is a multiple of
this number (or the engine's maximum): the rows that the widest int8 kernels compute together."""
SMALLEST = 64
"""Smallest value of the maximum number of prompt tokens that are computed between two decode steps, unless
the engine's maximum is smaller. With fewer, int8 matrix products wait for the weights, 4.5 bits each, which
are read once for all tokens: 0.035 bytes for each multiplication with 16 tokens, 0.009 with 64.
`ci/bench/constants --bundle BUNDLE prompt_turns.SMALLEST` compares the cost of a token."""


class TurnLength:
    """Decides how many prompt tokens the engine computes in its next turn (before the next decode step), from
    the speed of the last turn."""

    def __init__(self, limit: int) -> None:
        """Creates the object that decides how many prompt tokens come before the next decode step. limit: the
        maximum number, which is used until a speed has been measured."""
        self._limit = limit
        self._token_seconds = 0.0

    def tokens(self, alone: bool) -> int:
        """Returns the maximum number of prompt tokens to compute before the next decode step. alone: True if
        no other request runs or waits; the number is then the largest possible, as it is before a first
        measurement. Else it is a multiple of 16 that takes about 0.25 s (TURN_SECONDS) at the measured speed,
        but at least 64 and at most the largest possible number."""
        if alone or not self._token_seconds:
            return self._limit
        whole_tiles = int(TURN_SECONDS / self._token_seconds) // ROW_MULTIPLE * ROW_MULTIPLE
        return min(self._limit, max(SMALLEST, whole_tiles))

    def record(self, tokens: int, seconds: float) -> None:
        """Records that `tokens` prompt tokens have been computed in `seconds`, from which the next number of
        prompt tokens follows. Fewer than 64 tokens (or the maximum number, if that is smaller) are ignored:
        they wait for weights and do not show the cost of a token."""
        if tokens >= min(SMALLEST, self._limit):
            self._token_seconds = seconds / tokens


def allot(prompts: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Returns for each prompt, in order, how many of its tokens to compute before the next decode step,
    `room` together at most. Half of them is reserved for the first prompt, as far as it has so many; the rest
    goes by priority, then to the prompts (the first included) with the fewest remaining tokens, so that
    others may get 0.

    prompts: (priority, remaining tokens) of each prompt, sorted by priority (the lowest goes first) and then
    by age, the oldest first.
    """
    counts = [0] * len(prompts)
    if prompts:
        counts[0] = min(prompts[0][1], -(-room // 2))
        room -= counts[0]
    for place, (_, left) in sorted(enumerate(prompts), key=lambda item: item[1]):
        more = min(room, left - counts[place])
        counts[place] += more
        room -= more
    return counts
