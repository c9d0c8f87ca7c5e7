"""The engine runs a model for any number of clients: it receives requests and returns events."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from mlcbuild_format.bundle import Manifest, Pooling
from mlcbuild_format.errors import EngineError

from mlcbuild_runtime.constraints.grammar import Grammars
from mlcbuild_runtime.engine.admission import answer_limit, longest_text
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.intake import Intake
from mlcbuild_runtime.engine.loop import Loop
from mlcbuild_runtime.engine.pages import Pages
from mlcbuild_runtime.engine.request import Request, Sink, State, Ticket
from mlcbuild_runtime.engine.runner import Runner
from mlcbuild_runtime.engine.scheduler import Schedule
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.engine.speculation import Speculation
from mlcbuild_runtime.engine.threads import Task
from mlcbuild_runtime.engine.trace import Trace
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.text.tokenizer import Tokenizer


class Engine:
    """Serves requests with one model: its thread forms batches of them, and runs each step on the executor.
    Call `start`, then `submit` from any thread, then `close`."""

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, options: EngineOptions | None = None
    ) -> None:
        """Creates an engine for a loaded bundle, which does not run yet, and loads the draft bundle that
        `options` names, if any. Raises BundleError if the draft bundle is damaged, is for another device or
        processor, or does not fit the model, SetupError if the machine lacks something else that loading it
        needs."""
        self.executor, self.tokenizer, self.options = executor, tokenizer, options or EngineOptions()
        manifest = executor.manifest
        self.grammars = Grammars(tokenizer.vocabulary, manifest.vocab_size, tokenizer.eos)
        page_size = manifest.limits.page_size
        self._schedule = Schedule(Pages(executor.pages), page_size, self.max_batch, manifest.window)
        self._intake = Intake(self.options.max_waiting, executor.interrupt)
        speculation = Speculation.load(self.options.speculate, executor, tokenizer)
        self._runner = Runner(executor, self._schedule, speculation, self.options.turns)
        self._loop = Loop(self._runner, self._intake, self.prefill_chunk)
        self._thread = Task(self._loop.run)

    @property
    def manifest(self) -> Manifest:
        return self.executor.manifest

    @property
    def name(self) -> str:
        """Returns the name by which requests and answers call the model."""
        return self.options.name or self.manifest.name

    @property
    def pooling(self) -> Pooling:
        return self.options.pooling or self.manifest.serving.pooling

    @property
    def max_batch(self) -> int:
        """Returns the maximum number of sequences that the engine computes in one step."""
        limit = self.manifest.limits.max_batch
        return min(self.options.max_batch or limit, limit)

    @property
    def prefill_chunk(self) -> int:
        """Returns the maximum number of prompt tokens computed between two decode steps."""
        limit = self.manifest.limits.prefill_chunk
        return min(self.options.prefill_chunk or limit, limit)

    @cached_property
    def longest_text(self) -> int:
        """Returns the size in bytes above which a text is refused, because its tokens, of at most 16 bytes
        each, are assumed not to fit the model's context."""
        return longest_text(self.manifest, self.tokenizer)

    def start(self, trace: Trace | None = None) -> Engine:
        """Starts the engine's thread and returns this engine. trace: file to which every step and request is
        written; None for no trace."""
        self._runner.delivery.trace = trace
        self._thread.start()
        return self

    @property
    def ready(self) -> bool:
        """Returns True while the engine accepts new requests: from `start` on, until `drain` or `close` is
        called or its thread has failed."""
        return self._thread.is_alive() and not self._intake.draining and not self._intake.closed

    def drain(self) -> None:
        """Makes the engine refuse new requests with RequestError (503), without waiting. Submitted ones
        continue, and later parts of a client's request that is being answered are still accepted."""
        self._intake.drain()

    def close(self, timeout: float = 1.0) -> bool:
        """Ends every request with an error and stops the engine's thread and child processes for good; the
        executor stays open. Waits up to `timeout` seconds; returns False if a step still runs then, after
        which the thread ends by itself."""
        self._intake.close()
        self.tokenizer.template.close()
        self.grammars.close()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def state(self) -> State:
        schedule, counters = self._schedule, self._runner.counters
        waiting = self._waiting()  # This is read before `running`, since requests go from one to the other.
        return State(
            running=len(schedule.active),
            waiting=waiting,
            free_pages=schedule.pages.available,
            cached_pages=schedule.pages.cached,
            pages=self.executor.pages,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=schedule.cached_tokens,
            answer_tokens=counters.answer_tokens,
            decode_steps=counters.decode_steps,
            drafted_tokens=counters.drafted_tokens,
            accepted_tokens=counters.accepted_tokens,
            preemptions=schedule.preemptions,
            alive=self._thread.is_alive(),
        )

    def submit(self, request: Request, sink: Sink, window: int | None = None) -> Ticket:
        """Submits a request to the engine and returns its ticket; the engine's thread calls `sink` with each
        of the request's events.

        window: maximum number of events that are delivered before the client marks them as read on the
        ticket; at that number the request pauses; None for no limit. Raises RequestError if the request
        cannot be served, too many requests wait or the engine is draining, EngineError if it is stopped.
        """
        request = replace(request, max_tokens=answer_limit(request, self.executor))
        matcher = None if request.constraint is None else request.constraint.matcher()
        ticket = Ticket(self._intake.wake, window)
        sequence = Sequence(request, sink, ticket, self.tokenizer, self.executor.sample, matcher)
        if not self._thread.is_alive():
            raise EngineError("the engine is stopped")
        self._intake.submit(sequence, self._waiting, self._runner.delivery.announce)
        return ticket

    def _waiting(self) -> int:
        return self._intake.pending + len(self._schedule.waiting)
