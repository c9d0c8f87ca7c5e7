"""Compiles constraints (JSON schemas, regular expressions, grammars) on trial in stages: with little CPU time
first, then with more, each stage in a separate process with a queue.

The cost of a constraint is known only after a trial. One that exceeds a stage's CPU time goes on to the next
stage, and is refused after the last one. So a constraint that fits into a stage waits for costlier ones only
until they have used up the CPU time of that stage: forty clients whose constraints take seconds wait in the
last queue, and a schema of a tenth of a second overtakes them.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from mlcbuild_runtime.constraints import trial
from mlcbuild_runtime.constraints.guidance import Tokens
from mlcbuild_runtime.constraints.trial import TooCostlyError, Trial, TrialOutcome
from mlcbuild_runtime.text.turns import FairLock, in_nice_thread

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """The limits for one stage of trying constraints, such as JSON schemas, in a child process before the
    server accepts them: CPU seconds, length of the queue, seconds of waiting, and niceness."""

    seconds: float
    """Maximum CPU seconds in this stage for compiling a constraint on trial in a child process and following
    it for some tokens; one that exceeds them goes on to the next stage, or is refused in the last."""
    places: int
    """Maximum number of constraints that may wait for the child process to compile them on trial; beyond it,
    one request is refused: the new one, or the last one of the client with the most waiting if that has at
    least two more than the new one's client."""
    patience: float
    """Maximum seconds that a constraint waits for the child process to compile it on trial; after that, its
    request is refused."""
    multiple: float | None = None
    """A second limit of the CPU time for compiling a constraint on trial: this number times the CPU time of a
    plain JSON schema with the model's vocabulary. The smaller limit counts; None: there is no second limit.
    """
    niceness: int = 0
    """Niceness (0: normal, 19: lowest priority) of the child process that compiles constraints on trial."""
    compile_niceness: int = 0
    """Niceness (0: normal, 19: lowest priority) of the server's thread that compiles a constraint, after it
    was compiled and followed successfully in a child process. The first stage ignores it: there the request's
    own thread compiles."""


STAGES = (
    Stage(0.03, places=64, patience=10, multiple=3),
    Stage(0.1, places=64, patience=10, niceness=5),
    Stage(2.0, places=64, patience=20, niceness=10, compile_niceness=5),
)
"""The stages in which constraints are tried, shortest first: a constraint that exceeds the CPU time of one
stage is tried again in the next one, and refused after the last.

A plain schema takes 5 ms with a vocabulary of 500 tokens and 8 ms with one of 150,000 (AMD EPYC, idle),
mostly for page faults after a fork, and up to 12 ms on a busy machine (`ci/bench/hostile`, load 8). 40 slow
constraints that arrive at once delay it by 0.9 CPU seconds. Later stages have a higher niceness, because more
clients wait for the earlier ones. The queues of later stages have as many places as that of the first one,
because a client that they refused would return to the first stage at once.
"""
KEPT = 256
"""Maximum number of constraints, of at most SHORT characters, for which the outcome of the trial in a child
process is cached: the memory that they need, or the reason why they are refused. The least recently used
outcomes are dropped."""
SHORT = 1 << 12
"""Maximum length in characters of a constraint (as a Lark grammar) for which the outcome of a trial is
cached."""
DELAY = 5.0
"""Seconds by which a constraint that looks costly counts as having arrived later than it did, so that others
of the same client go first. Forty of one client at once take 2.4 s in the first stage (`ci/bench/hostile`,
Xeon with AMX, 2 cores, load 3). A plain schema of the same client then waited for up to 2.0 s without this
delay, for 1.8 s with a delay of 2 s, and for 0.3 s with 5 s."""
_LARGE_NUMBER = re.compile(r"\b\d{3}")


def looks_costly(grammar: str) -> bool:
    """Returns True if a constraint, the text of a Lark grammar, has more than SHORT (4096) characters or a
    number of three or more digits, such as `maxItems: 900`, `a{1000}` or `multipleOf: 99991`.

    This is a guess: most expensive constraints look so and few cheap ones do. It only decides which of two
    constraints of one client is tried first.
    """
    return len(grammar) > SHORT or _LARGE_NUMBER.search(grammar) is not None


class _Try:
    """One stage in which constraints are compiled on trial: its limits, the child process that compiles one
    constraint at a time and follows it for some tokens, and the queue of constraints that wait for the
    process."""

    def __init__(self, stage: Stage, tokens: Tokens) -> None:
        self.stage, self.turns = stage, FairLock(stage.places)
        self.trial = Trial(tokens, stage.seconds, stage.niceness, stage.multiple)


class Trials(Generic[T]):
    """Compiles constraints for one vocabulary on trial, in child processes, before the server compiles them,
    and refuses those that need too much time or memory, with a reason. It caches the outcomes. Any thread may
    use it."""

    def __init__(self, tokens: Tokens, stages: tuple[Stage, ...] = STAGES) -> None:
        self.tries = tuple(_Try(stage, tokens) for stage in stages)
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[Hashable, tuple[int, TrialOutcome]] = OrderedDict()
        """Cached results of trial compilations. Key of a constraint -> (index of the stage of increasing time
        limits in which its compilation ended, the bytes that it needs or the reason why it is refused)."""

    def passed(self, key: Hashable, grammar: str, use: Callable[[TrialOutcome], T | str]) -> T | str:
        """Tries in a child process whether the constraint `grammar` (in Lark) can be compiled, in stages with
        rising limits of CPU time, until one suffices; after the last one it is refused. A cached outcome for
        `key` replaces the trial. Returns the result of `use` if the trial succeeds, else the reason for the
        refusal.

        use: function from the outcome of the trial, which states the bytes of memory used, to the compiled
        constraint or an error message. For a constraint that exceeds the first limit it runs in a thread of
        low priority, for one constraint at a time in each stage. Raises CrowdedError if too many constraints
        wait in a stage, this one has waited too long, or one of another client takes its place in a full
        queue, StoppingError if it needs a trial after `close`, and SetupError if no child process can be
        started.
        """
        decided, outcome = self._cached(key)
        delay = DELAY if looks_costly(grammar) else 0.0
        for number, each in enumerate(self.tries):
            if outcome is not None and (outcome.error or decided > number):
                continue
            with suppress(TooCostlyError), each.turns.turn(each.stage.patience, delay):
                outcome = outcome or self._tried(key, number, grammar)
                if number and not outcome.error:
                    return in_nice_thread(each.stage.compile_niceness, partial(use, outcome))
            if outcome is not None and not number and not outcome.error:
                return use(outcome)
        assert outcome is not None  # The last stage always has an error.
        return outcome.error

    def forget(self, key: Hashable) -> None:
        """Removes the outcome of a constraint's trial compilation from the cache, if it is there."""
        with self._lock:
            self._outcomes.pop(key, None)

    def close(self) -> None:
        """Ends the child processes in which constraints are compiled on trial; no new ones are started.
        Trials that are in progress or come later raise StoppingError. Any thread may call it."""
        for each in self.tries:
            each.trial.close()

    def _cached(self, key: Hashable) -> tuple[int, TrialOutcome | None]:
        with self._lock:
            if key not in self._outcomes:
                return 0, None
            self._outcomes.move_to_end(key)
            return self._outcomes[key]

    def _tried(self, key: Hashable, number: int, grammar: str) -> TrialOutcome:
        """Compiles the constraint `grammar` (in Lark) on trial in a child process, and follows it there for
        some tokens. Returns the outcome, with the memory that this took or the reason for a refusal, and
        caches it under `key` if the constraint has at most SHORT characters.

        number: index of the child process among those with rising limits of CPU time. Raises TooCostlyError,
        which is not cached, if the constraint reaches a limit of CPU time or memory; in the last of these
        processes, it is refused instead. Raises StoppingError if the process is closed, and SetupError if it
        cannot be started.
        """
        each = self.tries[number]
        try:
            outcome = each.trial.run(grammar)
        except TooCostlyError:
            if number + 1 < len(self.tries):
                raise
            most = f"{each.stage.seconds:g} s or {trial.MEMORY >> 20} MiB"
            outcome = TrialOutcome(f"it takes more than {most} to compile and begin: simplify it", 0)
        if len(grammar) <= SHORT:
            with self._lock:
                self._outcomes[key] = number, outcome
                while len(self._outcomes) > KEPT:
                    self._outcomes.popitem(last=False)
        return outcome
