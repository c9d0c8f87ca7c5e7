"""Delivers the engine's results to its clients: events and the ends of requests. It also writes requests and
steps to the trace file, if there is one."""

from __future__ import annotations

import logging
from collections.abc import Sequence as List

from mlcbuild_format.errors import EngineError

from mlcbuild_runtime.engine.counters import Counters
from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.engine.scheduler import Schedule
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.engine.trace import Trace

log = logging.getLogger(__name__)

Part = tuple[Sequence, int]
"""The part of one sequence in a step of the model: (sequence, number of its tokens that the step computes).
"""


class Delivery:
    """Delivers events to the clients of an engine. The last event of a request frees its place in the batch
    and its pages of the KV cache."""

    def __init__(self, schedule: Schedule, counters: Counters) -> None:
        self._schedule, self._counters = schedule, counters
        self.trace: Trace | None = None

    def announce(self, number: int, sequence: Sequence) -> None:
        """Records the arrival of request `number` in the trace, if one is kept. Called by the thread that
        submits the request."""
        if self.trace is not None:
            self.trace.request(number, "b", {"prompt_tokens": len(sequence.request.prompt)})

    def deliver(self, sequence: Sequence, events: List[Event]) -> None:
        for event in events:
            self._counters.answer_tokens += event.error is None and event.tokens > 0
            if event.tokens == 1 and self.trace is not None:
                self.trace.request(sequence.order, "n")
            if event.last:
                self.end(sequence, event)
            else:
                sequence.client.deliver(event)

    def end(self, sequence: Sequence, event: Event) -> None:
        # Pages that a failing model has computed must not be shared with other requests.
        self._schedule.remove(sequence, forget=isinstance(event.error, EngineError))
        self._trace_end(sequence, "error" if event.error is not None else event.finish)
        sequence.client.deliver(event)

    def fail(self, sequences: List[Sequence], error: Exception) -> None:
        """Logs `error`, with which a step failed, and ends each of the requests `sequences`: its client gets
        an event with an EngineError. Their pages of the KV cache are not kept for other requests."""
        log.exception("a step has failed", exc_info=error)
        reason = str(error) or type(error).__name__  # MemoryError has no text.
        for sequence in sequences:
            self.end(sequence, sequence.failure(EngineError(f"the model has failed: {reason}")))

    def cancel(self, sequence: Sequence) -> None:
        """Ends a request whose client has disconnected or cancelled it, without further events."""
        self._schedule.remove(sequence)
        self._trace_end(sequence, "cancelled")

    def trace_step(self, kind: str, parts: List[Part], moments: tuple[float, float, float]) -> None:
        """Records a step, and the numbers of running and waiting requests and of free pages, in the trace, if
        one is kept. kind: what the step computed, such as "decode"; parts: (sequence, number of its tokens in
        the step); moments: times of time.perf_counter, in seconds, at the step's beginning, at the model's
        result and at the end of delivery."""
        if self.trace is not None and parts:
            self.trace.step(kind, {sequence.order: count for sequence, count in parts}, moments)
            schedule = self._schedule
            self.trace.counters(
                {
                    "running": len(schedule.active),
                    "waiting": len(schedule.waiting),
                    "free pages": schedule.pages.available,
                }
            )

    def _trace_end(self, sequence: Sequence, reason: str | None) -> None:
        if self.trace is not None:
            args = {"end": reason, "cached_tokens": sequence.cached or 0, "answer_tokens": sequence.answered}
            self.trace.request(sequence.order, "e", args)
