"""The loop of the engine's thread.

Each iteration admits requests, computes a limited number of prompt tokens (a turn; see `prompt_turns`), and
then one decode step for all sequences whose prompt is computed. So a long prompt delays other requests by one
turn at a time. A step is all prefill or all decode, so that a sequence uses the same kernels, and gets the
same tokens, whatever else is in its batch. Mixing both would save one reading of the weights per turn of
hundreds of tokens, which is little, and would make answers depend on other requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as List
from queue import Empty

from mlcbuild_format.errors import EngineError, ServingError, StoppingError

from mlcbuild_runtime.engine.delivery import Part
from mlcbuild_runtime.engine.intake import Intake
from mlcbuild_runtime.engine.prompt_turns import TurnLength
from mlcbuild_runtime.engine.runner import Runner
from mlcbuild_runtime.engine.sequence import Sequence

log = logging.getLogger(__name__)

NAP = 0.2
"""Seconds between two checks of the requests' deadlines while every request is paused until
its client reads."""
BURST_SECONDS = 0.04
"""Maximum seconds of one burst of decode steps, after which clients receive their tokens: 25 times a second,
as often as a video has pictures. `ci/bench/constants --bundle BUNDLE loop.BURST_SECONDS` compares what other
lengths cost."""


class Loop:
    """The loop of one engine, which serves requests until the intake is closed. All methods run on the
    engine's thread."""

    def __init__(self, runner: Runner, intake: Intake, prefill_chunk: int) -> None:
        """Creates the loop of an engine's thread. prefill_chunk: maximum number of prompt tokens computed
        between two decode steps."""
        self._runner, self._intake, self._turn = runner, intake, TurnLength(prefill_chunk)
        self._executor, self._counters = runner.executor, runner.counters
        self._schedule, self._delivery = runner.schedule, runner.delivery
        self._pace: dict[int, float] = {}
        """Number of sequences in a step -> seconds of one decode step, the mean of the latest burst or single
        step that computed so many."""

    def run(self) -> None:
        schedule = self._schedule
        error: ServingError = EngineError("the engine has failed: see the server's log")
        try:
            while not self._intake.closed:
                self._receive()
                self._drop()
                schedule.admit()
                if any(sequence.prefilling for sequence in schedule.active):
                    self._prefill()
                self._decode(schedule.decodes(self._runner.speculation.rows))
            error = StoppingError()
        except Exception:
            log.exception("the engine has failed")
        finally:
            self._intake.close()
            self._receive()
            for sequence in [*schedule.active, *schedule.waiting]:
                self._delivery.end(sequence, sequence.failure(error))

    def _receive(self) -> None:
        """Moves new requests from the intake to the schedule. When there is nothing else to do, prepares
        memory of the KV cache and then blocks until a request arrives or the intake is woken; if there are
        requests, which are all paused, at most 0.2 s."""
        schedule, intake = self._schedule, self._intake
        idle = schedule.idle and not intake.closed
        if not idle and intake.empty:
            return
        for _ in self._executor.prepare_pages(schedule.pages.reached) if idle else ():
            if not intake.empty:
                break
        # A request can reach its deadline while its client does not read.
        nap = NAP if schedule.active or schedule.waiting else None
        while idle or not intake.empty:
            try:
                sequence = intake.get(wait=True, timeout=nap if idle else None)
            except Empty:
                return
            idle = False
            if sequence is not None:
                schedule.add(sequence)
                intake.received()

    def _drop(self) -> None:
        """Ends requests that were cancelled, without an event, and those whose deadline has passed, with an
        error event (status 504)."""
        for sequence in [*self._schedule.active, *self._schedule.waiting]:
            deadline = sequence.request.deadline
            if sequence.client.ticket.cancelled:
                self._delivery.cancel(sequence)
            elif deadline is not None and deadline.left < 0:
                self._delivery.end(sequence, sequence.failure(deadline.error()))

    def _prefill(self) -> None:
        """Computes some more tokens of the prompts that are not computed yet: as many as the engine may
        compute between two decode steps, and then up to 64 tokens of one prompt whose log-probabilities are
        requested."""
        room = self._turn.tokens(alone=len(self._schedule.active) + len(self._schedule.waiting) == 1)
        begun, before = self._executor.seconds(), self._counters.prompt_tokens
        parts = self._schedule.prefills(room)
        self._runner.step([part for part in parts if part[0].pool is None], prompt=True)
        self._runner.pool([part for part in parts if part[0].pool is not None])
        computed = self._counters.prompt_tokens - before
        if computed == sum(count for _, count in parts):  # Seconds of a failed step show no speed.
            self._turn.record(computed, self._executor.seconds() - begun)
        self._runner.step(self._schedule.scored(room), prompt=True)

    def _decode(self, parts: List[Part]) -> None:
        """Executes the decode step of `parts`: (sequence, number of tokens to compute). Each sequence gets
        its next token, more if its draft tokens are accepted. Without drafts, several steps may be executed
        before tokens are delivered, unless a prompt remains to be computed or a new request has arrived."""
        speculation = self._runner.speculation
        ready = [sequence for sequence, _ in parts if sequence.length + 1 == len(sequence.tokens)]
        if not any(map(speculation.concerns, ready)):
            self._decode_plain(parts)
            return
        # On CPUs this is CPU time, so that other processes' work does not count as the cost of a draft.
        rows, begun = sum(count for _, count in parts), self._executor.seconds()
        allotted = speculation.allot(ready, rows)
        stretched = [(sequence, self._schedule.stretch(sequence, count)) for sequence, count in allotted]
        speculation.propose([(sequence, count) for sequence, count in stretched if count > 0])
        speculation.spread(ready, rows, len(parts))
        for sequence in ready:
            self._schedule.branch(sequence)
        outcomes = self._runner.step(
            [(sequence, count + len(sequence.draft.tokens)) for sequence, count in parts]
        )
        if outcomes:  # A step that failed at once must not count as a fast one.
            speculation.settle(rows, outcomes, self._executor.seconds() - begun)

    def _decode_plain(self, parts: List[Part]) -> None:
        """Executes decode steps without drafts for `parts`: (sequence, number of tokens to compute). Several
        steps run in one burst, before any token is delivered, unless a prompt remains to be computed, a new
        request has arrived, or a sequence needs a separate step (as for log-probabilities or a penalty)."""
        sequences = [sequence for sequence, _ in parts]
        begun, before = time.perf_counter(), self._counters.decode_steps
        count = self._burst_length(sequences)
        if count > 1:
            self._runner.burst(sequences, count, BURST_SECONDS)
        else:
            self._runner.step(parts)
        if steps := self._counters.decode_steps - before:
            self._pace[len(parts)] = (time.perf_counter() - begun) / steps

    def _burst_length(self, sequences: List[Sequence]) -> int:
        """Returns the number of decode steps to execute in one burst, that is, without delivering tokens to
        clients in between; 1 or less for a single step without a burst. It is limited by what the sequences
        and the device allow, by the expected time (0.04 s) and by free pages. For a burst, it also allocates
        the KV cache pages for the tokens of these steps."""
        if any(sequence.prefilling for sequence in self._schedule.active):
            return 1
        count = min((sequence.steps_ahead for sequence in sequences), default=1)
        pace = self._pace.get(len(sequences), BURST_SECONDS)
        count = min(count, self._executor.burst, int(BURST_SECONDS / pace))
        if count > 1:
            self._executor.resume()  # This precedes the check: a later arrival interrupts again.
            count = count if self._intake.empty else 1
        for sequence in sequences if count > 1 else ():
            count = min(count, 1 + self._schedule.stretch(sequence, count - 1))
        return count
