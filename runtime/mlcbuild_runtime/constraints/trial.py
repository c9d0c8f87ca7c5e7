"""Compiles constraints (JSON schemas, regular expressions, grammars) on trial in a child process, which can
be killed when one costs too much.

The cost of a schema or a regular expression cannot be seen from its text: `multipleOf: 999983` takes half a
minute and half a gigabyte, and a thread that compiles it cannot be stopped. The child process holds the
model's vocabulary and forks for each constraint. The fork compiles it, follows it for some tokens and ends,
so that its memory is freed. A constraint that passes is compiled again by the server.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcbuild_runtime.constraints.guidance import MaskTime, Tokens, beginning, matcher, reason
from mlcbuild_runtime.text.child import Child, EndedError, limit_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

PATIENCE = 20.0
"""Wall-clock seconds after which a child process that compiles and follows a constraint is killed, and the
constraint counts as too costly. They are many times the CPU seconds allowed, for a machine that is busy with
other work."""
MEMORY = 128 << 20
"""Maximum bytes that one constraint may use, besides the memory that the child process has already, while
that compiles and follows it; beyond them it counts as too costly."""
STEPS = 16
"""Number of tokens for which a compiled constraint is followed, with random tokens that it allows, before the
server accepts it."""
PLAIN = (
    'start: %json {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}}'
    ', "required": ["name", "count"], "additionalProperties": false}'
)
"""A plain JSON schema as a Lark grammar, which serves as a unit of cost: a multiple of the CPU time that a
child process needs to compile it and to follow it for some tokens limits the first trial of every other
constraint."""


@dataclass(frozen=True)
class TrialOutcome:
    """The result of compiling a constraint on trial: the memory that it needs, or the reason why it is
    refused."""

    error: str
    """The reason why the constraint cannot be used; "" if it can."""
    bytes: int
    """Bytes of memory that compiling the constraint, and following it for some tokens, took in a child
    process."""


class TooCostlyError(Exception):
    """The error for a constraint that has reached a limit of time or memory while a child process compiled it
    and followed it for some tokens."""


class Trial:
    """A child process that tries constraints, one at a time, before the server uses them: it compiles each
    and follows it for some random tokens, so that one that needs too much time or memory is refused with
    TooCostlyError and cannot stop the server. It starts on first use. One thread at a time may run it; any
    thread may close it."""

    def __init__(
        self, tokens: Tokens, seconds: float, niceness: int = 0, multiple: float | None = None
    ) -> None:
        """Sets the limits of a child process that compiles constraints on trial; the process starts on first
        use. tokens: the model's vocabulary; seconds: maximum CPU time for one constraint; niceness: niceness
        of the process; multiple: a second limit of CPU time, as a multiple of the time for a plain JSON
        schema. The smaller limit counts; None: there is no second one."""
        self._seconds = seconds
        # Latin-1 can represent every byte, such as the 255 in tokens that are not text.
        self._child = Child(
            "mlcbuild_runtime.constraints.trial",
            "tries constraints",
            lambda: {
                "tokens": [data.decode("latin-1") for data in tokens.tokens],
                "special": tokens.special_token_ids,
                "ends": tokens.ends,
                "niceness": niceness,
                "multiple": multiple,
            },
        )

    def run(self, grammar: str) -> TrialOutcome:
        """Compiles a Lark grammar in the child process and follows it for up to 16 random tokens. Returns the
        bytes of memory that this took, or the reason why the grammar is refused. Raises TooCostlyError if it
        reaches the limit of time or memory, StartingError if the child process does not become ready,
        StoppingError once the process is closed, and SetupError if no child process can be started."""
        try:
            answer = self._child.ask({"grammar": grammar, "seconds": self._seconds}, PATIENCE)
        except EndedError:
            answer = None
        match answer:
            case {"error": str(error), "bytes": int(taken)}:
                return TrialOutcome(error, taken)
        raise TooCostlyError

    def close(self) -> None:
        """Ends the child process that compiles constraints on trial, also while it compiles one, which then
        raises StoppingError; no new one is started. Any thread may call it."""
        self._child.close()


def work() -> None:
    """Runs the child process that compiles constraints on trial: reads a vocabulary (one JSON object) from
    the first line of its input, then one JSON object with a grammar per line, until its input ends; writes
    the line `true` when it is ready, and then a line with the outcome of each grammar as JSON, null for one
    that reaches a limit."""
    source, out = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = json.loads(source.readline())
    os.nice(vocabulary["niceness"])
    tokens = Tokens(
        [text.encode("latin-1") for text in vocabulary["tokens"]], vocabulary["special"], vocabulary["ends"]
    )
    tokenizer = tokens.tokenizer()
    _tried(tokens, tokenizer, 'start: "a"')  # This loads modules once instead of in every fork.
    rest = _forked(tokens, tokenizer, 'start: "a"', PATIENCE) or {}
    most = math.inf if vocabulary["multiple"] is None else vocabulary["multiple"] * _plain(tokens, tokenizer)
    out.write(b"true\n")
    out.flush()
    for line in source:
        request = json.loads(line)
        answer = _forked(tokens, tokenizer, request["grammar"], min(request["seconds"], most))
        if answer is not None:
            answer["bytes"] = max(0, answer["bytes"] - rest.get("bytes", 0))
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


def _plain(tokens: Tokens, tokenizer: LLTokenizer) -> float:
    """Returns the CPU seconds for compiling a plain JSON schema and following it for some tokens in a fork of
    this process: the least of three measurements, because a busy machine adds to some of them; infinity if
    all three fail."""
    outcomes = [_forked(tokens, tokenizer, PLAIN, PATIENCE) for _ in range(3)]
    return min((outcome["seconds"] for outcome in outcomes if outcome), default=math.inf)


def _forked(tokens: Tokens, tokenizer: LLTokenizer, grammar: str, seconds: float) -> dict[str, Any] | None:
    """Compiles a Lark grammar and follows it for some tokens in a fork of this process. Returns {"error": the
    reason why it cannot be used, or "", "bytes": memory used, "seconds": CPU time used}; None if it reaches
    the limit of CPU time or memory."""
    readable, writable = os.pipe()
    if not (fork := os.fork()):
        try:
            _limit(seconds)
            os.write(writable, json.dumps(_tried(tokens, tokenizer, grammar)).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as answer:
        outcome: dict[str, Any] | None = json.loads(answer.read() or b"null")
    os.waitpid(fork, 0)
    return outcome


def _tried(tokens: Tokens, tokenizer: LLTokenizer, grammar: str) -> dict[str, Any] | None:
    """Compiles a Lark grammar in this process, without a limit of CPU time, and follows it for up to 16
    random tokens that it allows. Returns {"error": the reason why it cannot be used, or "", "bytes": memory
    used, "seconds": CPU time of this process so far}; None if this used more memory than a constraint may use
    (MEMORY bytes)."""
    before = _peak()
    grammar_matcher = matcher(tokenizer, grammar)
    error = beginning(grammar_matcher) or _followed(tokens, grammar_matcher)
    spent = _peak() - before
    if spent > MEMORY:
        return None
    return {"error": error and reason(error), "bytes": spent, "seconds": time.process_time()}


def _followed(tokens: Tokens, matcher: LLMatcher) -> str:
    """Follows a compiled constraint for up to 16 random tokens that it allows, plain letters and digits if
    possible. Returns an error message if llguidance fails, else one if logit masks took too much CPU time,
    else "". Errors of llguidance, which counts its work, come first: CPU time varies with page faults and
    waits for memory, and a constraint should get the same answer each time."""
    draws, size, time_taken, slow = np.random.default_rng(1), len(tokens.tokens), MaskTime(), ""
    for count in range(STEPS):
        begun = time.thread_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return str(matcher.get_error())
        slow = time_taken.add(time.thread_time() - begun, count) or slow
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=size, bitorder="little").view(np.bool_)
        (choices,) = (allowed & tokens.plain).nonzero()
        if not len(choices):
            (choices,) = (allowed & tokens.ordinary).nonzero()
        if not len(choices) or matcher.is_stopped():
            break
        if not matcher.consume_token(int(draws.choice(choices))):
            return str(matcher.get_error())
    return slow


def _peak() -> int:
    """Returns the peak resident memory of this process since its start, in bytes."""
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def _limit(seconds: float) -> None:
    """Limits this forked process from now on: its CPU time to `seconds`, and, where the system allows it, its
    address space to MEMORY plus 32 MiB above the present size. At a limit the process ends before it writes
    an outcome. Its stderr is discarded."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # Its signal ends the process.
    limit_memory(MEMORY + (32 << 20))
