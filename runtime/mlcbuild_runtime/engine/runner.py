"""Executes batches: forms a step of the model from sequences, runs it on the executor, and turns the result
into events for the clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from mlcbuild_format.errors import DeviceLostError

from mlcbuild_runtime.engine import multi_step
from mlcbuild_runtime.engine.counters import Counters
from mlcbuild_runtime.engine.delivery import Delivery, Part
from mlcbuild_runtime.engine.scheduler import Schedule
from mlcbuild_runtime.engine.sequence import Sequence, SequenceRows, masks_of
from mlcbuild_runtime.engine.speculation import DraftOutcome, Speculation, fanned
from mlcbuild_runtime.engine.threads import Turns
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.executor import Executor, StepOutput
from mlcbuild_runtime.executor.sampling_params import Floats


class StepInput(NamedTuple):
    """The input of one sequence in a step of the model: its new tokens, its length after them, and the
    numbers of the KV cache pages that hold it."""

    tokens: list[int]
    length: int
    pages: list[int]


class Runner:
    """Executes one step of the model, or a burst of decode steps, at a time, while this engine holds the lock
    that all engines of the process share. A step that raises an exception ends the requests of its own
    sequences with an error; one that is raised while the result for a sequence is read, only its own."""

    def __init__(
        self, executor: Executor, schedule: Schedule, speculation: Speculation, turns: Turns
    ) -> None:
        self.executor, self.schedule, self.speculation, self._turns = executor, schedule, speculation, turns
        self.counters = Counters()
        self.delivery = Delivery(schedule, self.counters)

    def step(self, parts: List[Part], prompt: bool = False) -> list[DraftOutcome]:
        """Computes one step of the model and delivers an event to the client for each new token. Returns, for
        each sequence from which a token was sampled, how many draft tokens were verified and accepted;
        sequences whose prompt is not computed completely yet are left out. If the step raises an exception,
        the requests end with an error, and [] is returned.

        parts: (sequence, number of its next tokens to compute, draft tokens included); prompt: True if the
        tokens belong to prompts.
        """
        if not parts:
            return []
        begun, sequences = time.perf_counter(), [sequence for sequence, _ in parts]
        for sequence in sequences:
            sequence.client.stopwatch.begin(begun)
        result: StepOutput | None = None
        with self._ending(sequences):
            params = [sequence.sampling_params(count) for sequence, count in parts]
            counts = list(map(len, params))
            flat, masks = list(chain.from_iterable(params)), masks_of(sequences, counts)
            step, inputs = self._step_of(parts, counts, prompt)
            with self._turns:
                result = self.executor.step(step, flat, masks)
        computed = time.perf_counter()
        outcomes = []
        if result is not None:
            self.counters.decode_steps += not prompt
            self._note_computed(parts, inputs, prompt)
            outcomes = self._consume(parts, counts, result)
        kind = "prefill" if prompt else "decode"
        self.delivery.trace_step(kind, parts, (begun, computed, time.perf_counter()))
        return outcomes

    def _consume(self, parts: List[Part], counts: list[int], result: StepOutput) -> list[DraftOutcome]:
        outcomes = []
        ends = pairwise(accumulate(counts, initial=0))
        for (sequence, _), (start, end) in zip(parts, ends, strict=True):
            rows = SequenceRows(result, start, end)
            with self._ending([sequence]):  # A device may read logits only now.
                if sequence.request.prompt_logprobs:
                    sequence.scores.add(rows.logits(), sequence.length - len(rows) + 1)
                if sequence.complete:
                    outcomes.append(self._draw(sequence, rows))
        return outcomes

    def _draw(self, sequence: Sequence, rows: SequenceRows) -> DraftOutcome:
        draft = sequence.draft
        drafted, branched, before = len(draft.tokens), draft.branched, draft.accepted
        events = sequence.consume(rows.last(1 + drafted + branched))
        accepted = draft.accepted - before
        self.counters.drafted_tokens += drafted + branched
        self.counters.accepted_tokens += accepted
        self.schedule.prune(sequence)
        self.delivery.deliver(sequence, events)
        self.schedule.trim(sequence)
        gained = draft.branch_gain
        return DraftOutcome(sequence, drafted, accepted - gained, branched, gained)

    def pool(self, parts: List[Part]) -> None:
        """Computes the next prompt tokens of sequences whose answer is an embedding, and delivers the
        embeddings that are complete. parts: (sequence, number of tokens to compute). If the computation
        raises an exception, the requests end with an error."""
        if not parts:
            return
        states: Floats | None = None
        with self._ending([sequence for sequence, _ in parts]):
            step, inputs = self._step_of(parts, None, prompt=True)
            with self._turns:
                states = self.executor.hidden_states(step)
        if states is None:
            return
        self._note_computed(parts, inputs, prompt=True)
        ends = pairwise(accumulate((count for _, count in parts), initial=0))
        for (sequence, _), (start, end) in zip(parts, ends, strict=True):
            with self._ending([sequence]):
                if event := sequence.add_states(states[start:end]):
                    self.delivery.deliver(sequence, [event])

    def burst(self, sequences: List[Sequence], count: int, seconds: float) -> None:
        """Executes up to `count` decode steps of `sequences`, fewer if another engine of the process waits
        for the lock under which engines compute, then delivers all their tokens to the clients. If a sequence
        has a constraint, no step but the first begins later than `seconds` after this engine has acquired
        that lock. If a step raises an exception, it is logged, and the requests end with an error after the
        tokens sampled so far. Each sequence must have KV cache pages for these steps."""
        begun, before = time.perf_counter(), [len(s.tokens) for s in sequences]
        failure: Exception | None = None
        try:
            with self._turns:
                self._turns.on_wait(self.executor.interrupt)
                if any(sequence.constrained for sequence in sequences):
                    multi_step.guided(self.executor, sequences, count, time.perf_counter() + seconds)
                else:
                    multi_step.unguided(self.executor, sequences, count)
        except Exception as error:  # Whatever the device raises
            failure = error
        computed = time.perf_counter()
        executed = max(len(s.tokens) - old for s, old in zip(sequences, before, strict=True))
        self.counters.decode_steps += executed
        for sequence in sequences:
            with self._ending([sequence]):
                self.schedule.computed(sequence, 0)
                self.delivery.deliver(sequence, sequence.take_events())
                self.schedule.trim(sequence)
        if failure is not None:
            with self._ending([s for s in sequences if s in self.schedule.active]):
                raise failure
        parts = [(sequence, executed) for sequence in sequences]
        self.delivery.trace_step("decode", parts, (begun, computed, time.perf_counter()))

    def _step_of(
        self, parts: List[Part], counts: List[int] | None, prompt: bool
    ) -> tuple[ModelStep, list[StepInput]]:
        """Returns (the input of the model for one step, [(new tokens, length after them, KV cache pages) of
        each sequence]). parts: (sequence, number of tokens to compute); counts: for each sequence the number
        of rows whose logits are computed, None if hidden states are computed instead; prompt: True if the
        tokens belong to prompts."""
        size = self.executor.manifest.limits.page_size
        inputs = []
        for sequence, count in parts:
            end = sequence.length + count
            tokens = (sequence.tokens[sequence.length : end] + sequence.draft.tokens)[:count]
            inputs.append(StepInput(tokens, end, sequence.pages[: -(-end // size)]))
        if any(sequence.draft.branches for sequence, _ in parts):
            return fanned([sequence for sequence, _ in parts], inputs, size), inputs
        return ModelStep.of(inputs, counts, prompt), inputs

    @contextmanager
    def _ending(self, sequences: List[Sequence]) -> Iterator[None]:
        """Returns a context in which an exception ends the requests of `sequences` with an error. It goes no
        further, except DeviceLostError, which is to end the engine."""
        try:
            yield
        except Exception as error:  # Whatever the device raises
            self.delivery.fail(sequences, error)
            if isinstance(error, DeviceLostError):
                raise

    def _note_computed(self, parts: List[Part], inputs: List[StepInput], prompt: bool) -> None:
        """Records, after a step, that the KV cache holds the keys and values of the step's tokens, except
        draft tokens, which are not verified yet, and makes the draft model, if there is one, compute the
        prompt tokens among them. parts: pairs (sequence, number of its tokens in the step, with its draft
        tokens); inputs: (new tokens, length after them, KV cache pages) of each sequence; prompt: True if the
        tokens belong to prompts."""
        prompts = [
            (s, step_input)
            for (s, _), step_input in zip(parts, inputs, strict=True)
            if prompt and s.prefilling
        ]
        self.counters.prompt_tokens += sum(len(step_input.tokens) for _, step_input in prompts)
        for sequence, count in parts:
            self.schedule.computed(sequence, count - len(sequence.draft.tokens))
        if prompts:
            self.speculation.prefilled(prompts)
