"""Compiles constraints in a child process first, where one that costs too much can be ended.

The cost of a schema or a regular expression cannot be seen from its text: `multipleOf: 999983` takes half a
minute and half a gigabyte, and a thread that compiles it cannot be stopped. The child process holds the
model's vocabulary and forks for each constraint. The fork compiles it, follows it for some tokens, and ends,
so that nothing of a constraint stays behind. A constraint that passes is compiled again by the server.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcbuild_runtime.constraints.guidance import STEP_SECONDS, Tokens, beginning, matcher, reason, slow_mask
from mlcbuild_runtime.text.child import Child, EndedError, limit_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

PATIENCE = 20.0
"""Seconds by the clock after which a trial is given up, on a machine that is busy with other things."""
MEMORY = 128 << 20
"""Bytes that one constraint may take while it is compiled and followed."""
STEPS = 16
"""Tokens that a trial follows a constraint for."""


@dataclass(frozen=True)
class Outcome:
    """What a trial has shown."""

    error: str
    """The reason why the constraint cannot be used; empty where it can."""
    bytes: int
    """Memory that the trial took."""
    slow: bool = False
    """It takes more processor time than a first trial has."""


class TooCostlyError(Exception):
    """A constraint has reached a limit of its trial."""


class Trial:
    """A child process that tries constraints one after the other; it is started when it is first needed. One
    thread at a time may run it; any thread may close it."""

    def __init__(self, tokens: Tokens, seconds: float, niceness: int = 0) -> None:
        """`seconds`: processor time that one constraint may take. `niceness`: of the process."""
        self._seconds = seconds
        # Byte 255 is in tokens that are no text: Latin-1 writes every byte.
        self._child = Child(
            "mlcbuild_runtime.constraints.trial",
            "tries constraints",
            lambda: {
                "tokens": [data.decode("latin-1") for data in tokens.tokens],
                "special": tokens.special_token_ids,
                "ends": tokens.ends,
                "niceness": niceness,
            },
        )

    def run(self, grammar: str) -> Outcome:
        """Tries a grammar in Lark's language. Raises TooCostlyError for one that reaches a limit, SetupError
        when there can be no child process."""
        try:
            answer = self._child.ask({"grammar": grammar, "seconds": self._seconds}, PATIENCE)
        except EndedError:
            answer = None
        match answer:
            case {"error": str(error), "bytes": int(taken)}:
                return Outcome(error, taken)
        raise TooCostlyError

    def close(self) -> None:
        """Ends what is tried, from any thread."""
        self._child.close()


def work() -> None:
    """Runs the child process: reads a vocabulary and then one grammar a line, to the end of its input."""
    source, out = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = json.loads(source.readline())
    tokens = Tokens(
        [text.encode("latin-1") for text in vocabulary["tokens"]], vocabulary["special"], vocabulary["ends"]
    )
    tokenizer = tokens.tokenizer()
    _tried(tokens, tokenizer, 'start: "a"')  # loads what forks then need not load
    os.nice(vocabulary["niceness"])
    rest = _forked(tokens, tokenizer, 'start: "a"', PATIENCE) or {}
    out.write(b"true\n")
    out.flush()
    for line in source:
        wanted = json.loads(line)
        answer = _forked(tokens, tokenizer, wanted["grammar"], wanted["seconds"])
        if answer is not None:
            answer["bytes"] = max(0, answer["bytes"] - rest.get("bytes", 0))
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


def _forked(tokens: Tokens, tokenizer: LLTokenizer, grammar: str, seconds: float) -> dict[str, Any] | None:
    """Tries a grammar in a fork of this process; None where it reaches a limit."""
    readable, writable = os.pipe()
    if not (fork := os.fork()):
        try:
            _limit(seconds)
            os.write(writable, json.dumps(_tried(tokens, tokenizer, grammar)).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as answer:
        found: dict[str, Any] | None = json.loads(answer.read() or b"null")
    os.waitpid(fork, 0)
    return found


def _tried(tokens: Tokens, tokenizer: LLTokenizer, grammar: str) -> dict[str, Any] | None:
    """Compiles a grammar and follows it; None where that took too much memory."""
    before = _peak()
    found = matcher(tokenizer, grammar)
    error = beginning(found) or _followed(tokens, found)
    spent = _peak() - before
    return None if spent > MEMORY else {"error": error and reason(error), "bytes": spent}


def _followed(tokens: Tokens, matcher: LLMatcher) -> str:
    """Takes tokens at random, plain letters where they may come. Returns the error that this leads to."""
    draws, size = np.random.default_rng(1), len(tokens.tokens)
    for _ in range(STEPS):
        begun = time.thread_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return str(matcher.get_error())
        if (seconds := time.thread_time() - begun) > STEP_SECONDS:
            return slow_mask(seconds)
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=size, bitorder="little").view(np.bool_)
        (choices,) = (allowed & tokens.plain).nonzero()
        if not len(choices):
            (choices,) = (allowed & tokens.ordinary).nonzero()
        if not len(choices) or matcher.is_stopped():
            break
        if not matcher.consume_token(int(draws.choice(choices))):
            return str(matcher.get_error())
    return ""


def _peak() -> int:
    """Returns the most memory that this process has had, in bytes."""
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def _limit(seconds: float) -> None:
    """Limits a fork's time and memory. What ends at a limit writes nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    limit_memory(MEMORY + (32 << 20))
