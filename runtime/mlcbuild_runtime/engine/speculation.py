"""Speculative decoding: several tokens of a sequence are drafted and then verified in one step.

The model computes the last token and the draft in one step. Each row's token is sampled as without drafts,
with the random number of its position in the answer, and the next row counts as long as the sampled token is
the draft's. So a draft token of probability p is accepted with probability p, and its replacement follows the
remaining distribution: this is the rejection sampling of Leviathan et al. (2023, arXiv:2211.17192) for a
deterministic proposal. A draft bundle's proposals are sampled with the same random numbers as the model's
tokens, so that they agree when the distributions do (Daliri et al., 2024, arXiv:2408.07978). Either way an
answer is the same as without drafts, token by token, for every seed and whatever else is in its batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as List
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mlcbuild_format.errors import BundleError

from mlcbuild_runtime import untrusted
from mlcbuild_runtime.engine import draft_tree
from mlcbuild_runtime.engine.draft_tree import Branch, Fork, Part
from mlcbuild_runtime.engine.drafts import TOKENS, Prices, Speculate
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.executor.sampling_params import SKIP, Floats
from mlcbuild_runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_BRANCHED = 4
"""Maximum number of draft tokens on branches (alternatives to the draft) of one sequence in a step.
`ci/bench/speculation --set mlcbuild_runtime.engine.speculation.MAX_BRANCHED=8` measures the speed with
another maximum."""


class DraftOutcome(NamedTuple):
    """The outcome of one sequence's draft in one step: how many draft tokens were verified and accepted."""

    sequence: Sequence
    drafted: int
    accepted: int
    branched: int
    """Number of the sequence's draft tokens that were on branches (alternatives to the draft) in this
    step."""
    gained: int
    """Number of draft tokens on branches (alternatives to the draft) that were accepted in this step;
    `accepted` does not count them."""


class Speculation:
    """Proposes and adapts the drafts of all sequences of one engine (speculative decoding). All methods but
    `load` run on the engine's thread.
    """

    def __init__(
        self, tokens: int, rows: int, drafter: Drafter | None = None, guesses: bool = True, parts: int = 0
    ) -> None:
        """Creates the speculative decoding of one engine. tokens: maximum tokens of a draft. rows: maximum
        tokens in one step that verifies drafts. drafter: the draft model; None for prompt lookup. guesses:
        True if the drafter or prompt lookup drafts tokens; False for only tokens that clients predict. parts:
        maximum number of sequences in a step, each alternative to a draft counted as one more; 0 allows no
        alternatives."""
        self._tokens, self.rows, self._drafter, self._prices = tokens, rows, drafter, Prices()
        self._guesses, self._parts = guesses, parts

    @classmethod
    def load(cls, how: Speculate | None, executor: Executor, tokenizer: Tokenizer) -> Speculation:
        """Returns the speculative decoding of an engine. how: its settings; None: only clients' predictions
        are drafted. Raises BundleError if the draft bundle is damaged or does not fit the model, SetupError
        if this machine cannot run it."""
        limits = executor.manifest.limits
        rows = min(executor.exact_rows, limits.prefill_chunk)
        if how is None:
            return cls(TOKENS, rows, guesses=False)
        drafter = None if how.draft is None else Drafter.load(how.draft, executor, tokenizer)
        parts = limits.max_batch if how.branches else 0
        return cls(how.tokens, rows, drafter, parts=parts)

    def concerns(self, sequence: Sequence) -> bool:
        """Returns True if draft tokens may be proposed for this sequence: its request allows speculative
        decoding, and the engine or the client's prediction of the answer provides draft tokens."""
        return sequence.request.speculate and (self._guesses or bool(sequence.request.prediction))

    def allot(self, sequences: List[Sequence], rows: int) -> list[tuple[Sequence, int]]:
        """Returns (sequence, maximum number of draft tokens) for those of `sequences` that may draft in the
        coming step. rows: number of tokens that the step computes besides drafts."""
        room = self.rows - rows
        candidates = [
            (sequence, most)
            for sequence in sequences
            if self.concerns(sequence)
            and (most := min(sequence.draft.credit.affordable(self._tokens), sequence.remaining - 1)) > 0
        ]
        total = sum(most for _, most in candidates)
        room = self._prices.best(rows, min(room, total)) if room > 0 and candidates else room
        allotted = []
        for others, (sequence, most) in zip(range(len(candidates), 0, -1), candidates, strict=True):
            count = min(most, room // others)
            room -= max(0, count)
            if count > 0:
                allotted.append((sequence, count))
        return allotted

    def propose(self, parts: List[tuple[Sequence, int]]) -> None:
        """Drafts tokens for sequences and stores them in each sequence's draft state: those of the client's
        prediction, else of the draft model or prompt lookup, as far as the constraint allows them, possibly
        none. parts: (sequence, maximum number of draft tokens); the pages for these tokens must be allocated.
        """
        unpredicted = []
        for sequence, count in parts:
            sequence.draft.tokens = sequence.allowed(_predicted(sequence, count))
            if not sequence.draft.tokens and self._guesses:
                unpredicted.append((sequence, count))
        if self._drafter is None:
            for sequence, count in unpredicted:
                sequence.draft.tokens = sequence.draft.lookup.propose(sequence.tokens, count)
        elif unpredicted:
            self._draft(self._drafter, unpredicted)
        for sequence, _ in unpredicted:
            sequence.draft.tokens = sequence.allowed(sequence.draft.tokens)

    def spread(self, sequences: List[Sequence], rows: int, batch: int) -> None:
        """Adds branches (alternatives to the rest of a draft, verified in the same step) to the drafts of
        `sequences`, as many as are expected to save more time than they add to the step.

        rows: number of tokens that the step computes besides the drafts; batch: number of all sequences in
        the step.
        """
        drafts = [sequence.draft for sequence in sequences]
        drafted, branched = sum(len(draft.tokens) for draft in drafts), 0
        pace = batch - len(sequences) + sum(draft.odds.pace for draft in drafts)
        for sequence, draft in zip(sequences, drafts, strict=True) if self._parts else ():
            room = min(self.rows - rows - drafted - branched, self._tokens - len(draft.tokens))
            if not draft.tokens or self._parts <= batch or room < 1:
                continue
            more = range(branched + 1, branched + 1 + min(room, MAX_BRANCHED))
            count = draft.odds.worthwhile(pace, [self._prices.share(rows, drafted, each) for each in more])
            if count:
                alternatives = self._alternatives(sequence, count)
                draft.branches = _fitting(sequence, alternatives)[: self._parts - batch]
            batch, branched = batch + len(draft.branches), branched + draft.branched

    def _alternatives(self, sequence: Sequence, count: int) -> list[Branch]:
        if not self._guesses:
            return []
        if self._drafter is None:
            return sequence.draft.lookup.others(sequence.tokens, sequence.draft.tokens, count)
        return _doubtful(sequence, count)

    def settle(self, rows: int, outcomes: List[DraftOutcome], seconds: float) -> None:
        """Adapts the lengths of future drafts to the numbers of draft tokens that a step has accepted.

        rows: number of tokens that the step computed besides the drafts; outcomes: how many draft tokens of
        each sequence were verified and accepted; seconds: cost of the step and of drafting, by the executor's
        clock (CPU time on CPUs, wall time on GPUs)."""
        drafted = sum(outcome.drafted for outcome in outcomes)
        self._prices.observe(rows, drafted, seconds, sum(outcome.branched for outcome in outcomes))
        price = self._prices.price(rows, drafted) if drafted else 0
        for sequence, count, accepted, branched, gained in outcomes:
            if count:
                sequence.draft.credit.settle(count, accepted, price, gained)
                sequence.draft.odds.settle(branched, gained, 1 + accepted + gained)
            else:
                sequence.draft.credit.rest()

    def prefilled(self, parts: List[tuple[Sequence, Part]]) -> None:
        """Makes the draft model, if there is one, compute the prompt tokens that the model has just computed,
        since both use the same pages. A draft model that fails is not used any more. parts: (sequence, (new
        tokens, length after them, KV cache pages)) of each."""
        if self._drafter is not None:
            try:
                self._drafter.follow(parts)
            except Exception:  # Whatever the library raises
                self._give_up()

    def _draft(self, drafter: Drafter, parts: List[tuple[Sequence, int]]) -> None:
        try:
            drafter.draft(parts)
        except Exception:  # Whatever the library raises
            for sequence, _ in parts:
                sequence.draft.tokens = []
            self._give_up()

    def _give_up(self) -> None:
        """Stops using the draft model after it has failed: answers stay the same without it, but take
        longer."""
        log.exception("the draft bundle has failed and is not used any more")
        self._drafter = None


def _predicted(sequence: Sequence, count: int) -> list[int]:
    """Returns up to `count` draft tokens: the part of the client's prediction that may follow the answer so
    far, because the prediction has the answer's last tokens before it; [] if there is none."""
    request = sequence.request
    if not request.prediction:
        return []
    return sequence.draft.prediction.propose(sequence.tokens[len(request.prompt) :], count)


def _fitting(sequence: Sequence, branches: List[Branch]) -> list[Branch]:
    """Returns `branches`, the alternatives to the rest of a sequence's draft, each cut to the tokens that the
    sequence's constraint allows; those of which nothing remains are left out."""
    fitting = []
    for branch in branches:
        before = sequence.draft.tokens[: branch.start]
        tokens = sequence.allowed([*before, *branch.tokens])[branch.start :]
        if tokens:
            fitting.append(Branch(branch.start, tokens))
    return fitting


def _doubtful(sequence: Sequence, count: int) -> list[Branch]:
    """Returns up to `count` branches (alternatives to the rest) of a sequence's draft, of one token each: the
    second most likely token at the positions where the draft model was least certain."""
    doubts = sequence.draft.doubts[: len(sequence.draft.tokens)]
    positions = sorted(range(len(doubts)), key=lambda position: doubts[position])
    return [Branch(position, [doubts[position][1]]) for position in positions[:count]]


class Drafter:
    """A second, smaller model that drafts tokens. A token's keys and values are in the same page of both KV
    caches.
    """

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        """Creates a drafter. executor: the loaded draft bundle; vocab_size: number of tokens in the
        vocabulary of the model that verifies the drafts."""
        self._executor, self._vocab_size = executor, vocab_size

    @classmethod
    def load(cls, path: Path, model: Executor, tokenizer: Tokenizer) -> Drafter:
        """Loads the draft bundle in directory `path` and returns its drafter. Raises BundleError if it is
        damaged or does not fit `model` and its tokenizer, SetupError if this machine cannot run it."""
        draft, tokens = untrusted.load(path, pages=model.pages)
        refused = refusal(model, draft) or _other_tokens(model, tokenizer, draft, tokens)
        if refused is not None:
            raise BundleError(f"{path} cannot draft for {model.manifest.name}: {refused}")
        return cls(draft, model.manifest.vocab_size)

    def follow(self, parts: List[tuple[Sequence, Part]]) -> None:
        """Computes, with the draft model, the keys and values of tokens that the model has just computed.
        Sequences longer than the draft model's context are skipped. parts: (sequence, (new tokens, length
        after them, KV cache pages)) of each."""
        fitting = [(sequence, part) for sequence, part in parts if self._fits(part[1])]
        if fitting:
            self._forward([part for _, part in fitting])
        for sequence, (_, end, _) in fitting:
            sequence.draft.cached = end

    def draft(self, parts: List[tuple[Sequence, int]]) -> None:
        """Drafts tokens for sequences and adds them to each sequence's draft, one token at a time for all of
        them together. A sequence gets none if it would exceed the draft model's context, or has more tokens
        that the draft model has not computed yet than fit into one step with those of the other sequences.
        parts: (sequence, maximum number of draft tokens)."""
        going = self._caught_up([part for part in parts if self._fits(len(part[0].tokens) + part[1])])
        while going:
            rows = self._forward([self._part(sequence) for sequence, _ in going])
            more = []
            for (sequence, count), row in zip(going, rows, strict=True):
                sequence.draft.cached = len(sequence.tokens) + len(sequence.draft.tokens)
                proposed = sequence.propose(padded(row, self._vocab_size))
                if proposed and len(sequence.draft.tokens) < count:
                    more.append((sequence, count))
            going = more

    def _fits(self, length: int) -> bool:
        return length <= self._executor.manifest.limits.context_window

    def _part(self, sequence: Sequence) -> Part:
        draft, size = sequence.draft, len(sequence.tokens)
        tokens = [*sequence.tokens[draft.cached :], *draft.tokens[max(0, draft.cached - size) :]]
        return tokens, size + len(draft.tokens), sequence.pages

    def _caught_up(self, parts: List[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Returns those of `parts`, (sequence, number of draft tokens), that the draft model may continue in
        one step: the tokens that it has not computed yet of all of them fit into that step.

        A sequence with more such tokens than fit is left out. If none before it is returned, this method
        runs the draft model on as many of its tokens as one step holds, so that it is closer next time."""
        chunk = room = self._executor.manifest.limits.prefill_chunk
        ready = []
        for sequence, count in parts:
            draft = sequence.draft
            draft.cached = min(draft.cached, sequence.length)
            missing = len(sequence.tokens) - draft.cached
            if missing <= room:
                ready.append((sequence, count))
                room -= missing
            elif room == chunk:
                end = draft.cached + room
                self._forward([(sequence.tokens[draft.cached : end], end, sequence.pages)])
                draft.cached = end
        return ready

    def _forward(self, parts: List[Part]) -> Floats:
        """Computes a step of the draft model. parts: (new tokens, length after them, KV cache pages) of each
        sequence. Returns the logits of each sequence's last new token, float32 [len(parts), vocabulary of the
        draft model]."""
        manifest = self._executor.manifest
        size, last = manifest.limits.page_size, manifest.vocab_size - 1
        # The larger vocabulary ends with padding tokens that the smaller one lacks.
        bounded = [([min(token, last) for token in tokens], end, pages) for tokens, end, pages in parts]
        step = ModelStep.of([(tokens, end, pages[: -(-end // size)]) for tokens, end, pages in bounded])
        return self._executor.step(step, [SKIP] * len(parts)).logits()


def fanned(sequences: List[Sequence], inputs: List[Part], size: int) -> ModelStep:
    """Returns the input of one decode step, as `ModelStep`, in which each branch (alternative to the draft)
    of the sequences' drafts is computed like another sequence, right after its own one: it shares full KV
    cache pages with its sequence and copies a partly filled one. inputs: (new tokens, length after them, KV
    cache pages) of each sequence; size: number of tokens in a page."""
    parts, counts, forks = list[Part](), list[int](), list[Fork]()
    for sequence, part in zip(sequences, inputs, strict=True):
        draft = sequence.draft
        more, copies = draft_tree.parts(len(sequence.tokens), sequence.pages, draft.branches, size)
        parts += [part, *more]
        counts += [1 + len(draft.tokens), *[len(tokens) for tokens, _, _ in more]]
        forks += copies
    return ModelStep.of(parts, counts, prompt=False)._replace(forks=forks)


def refusal(model: Executor, draft: Executor) -> str | None:
    """Returns the reason why the bundle `draft` cannot draft for `model`: its pages have another size, or its
    prefill_chunk or max_batch is smaller. None if it can; vocabularies are not compared here."""
    ours, theirs = model.manifest.limits, draft.manifest.limits
    if ours.page_size != theirs.page_size:
        return f"its pages hold {theirs.page_size} tokens, not {ours.page_size}"
    for name in ("prefill_chunk", "max_batch"):
        required, stated = getattr(ours, name), getattr(theirs, name)
        if stated < required:
            return f"it was compiled with {name} = {stated}, and at least {required} is needed"
    return None


def _other_tokens(model: Executor, tokenizer: Tokenizer, draft: Executor, other: Tokenizer) -> str | None:
    """Returns the first difference between the vocabularies of a model and of a draft bundle, as an error
    message; None if they differ in nothing but the padding at the end. other: tokenizer of the draft bundle.
    """
    sizes = model.manifest.vocab_size, draft.manifest.vocab_size
    for token in range(max(sizes)):
        names = [each.vocabulary.token_name(token) for each in (tokenizer, other)]
        if names[0] != names[1] or (names[0] and token >= min(sizes)):
            return (
                f"token {token} is {names[1]!r} there and {names[0]!r} here, with vocabularies of {sizes[1]}"
                f" and {sizes[0]} tokens; both need the same one"
            )
    return None


def padded(logits: Floats, size: int) -> Floats:
    """Returns a row of logits cut or extended to a vocabulary of `size` tokens; added tokens get minus
    infinity."""
    if len(logits) >= size:
        return logits[:size]
    return np.concatenate([logits, np.full(size - len(logits), -np.inf, np.float32)])
