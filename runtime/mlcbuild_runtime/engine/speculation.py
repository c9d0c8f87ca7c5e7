"""Speculative decoding: several tokens of a sequence in one step, drafted first and then checked.

The model computes the last token and the draft in one step. Then each row's token is chosen as it is
without drafts, with the random number of its place in the answer, and the next row counts as long as the
chosen token is the drafted one. A draft of probability p is so accepted with probability p, and what comes in
its place is distributed as the rest: that is rejection sampling of Leviathan et al. (2023, arXiv:2211.17192)
for a proposal that is certain. A draft bundle's proposals are drawn with the same random numbers as the
model's tokens, so that they agree when the distributions do (Daliri et al., 2024, arXiv:2408.07978). Either
way an answer is what it is without drafts, token by token, for every seed and whatever shares its batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as List
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mlcbuild_format.errors import BundleError

from mlcbuild_runtime.devices.cpu import Floats, Model
from mlcbuild_runtime.engine import draft_tree
from mlcbuild_runtime.engine.draft_tree import Branch, Fork, Part
from mlcbuild_runtime.engine.drafts import TOKENS, Prices, Speculate
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.executor.batch import Step
from mlcbuild_runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ROWS = 16
"""Rows of a step with drafts, or with tokens that are computed again. Up to so many, kernels give each row
what it has alone, bit by bit."""


BRANCHED = 4
"""Tokens on branches of one sequence, at most."""


class Checked(NamedTuple):
    """What became of the draft of a sequence."""

    sequence: Sequence
    drafted: int
    accepted: int
    branched: int
    """Tokens on branches."""
    gained: int
    """Those of them that were right, after what was accepted of the draft."""


class Speculation:
    """Drafts for one engine. All but `load` runs on the engine's thread."""

    def __init__(
        self, tokens: int, rows: int, drafter: Drafter | None = None, guesses: bool = True, parts: int = 0
    ) -> None:
        """`tokens`: to draft at most. `rows`: of a step with drafts. `guesses`: more than what clients
        predict. `parts`: sequences and branches of a step at most; 0: no branches."""
        self._tokens, self.rows, self._drafter, self._prices = tokens, rows, drafter, Prices()
        self._guesses, self._parts = guesses, parts

    @classmethod
    def load(cls, how: Speculate | None, model: Model, tokenizer: Tokenizer) -> Speculation:
        """None: only what clients predict. Raises BundleError when the draft bundle does not fit."""
        rows = min(ROWS, model.limits.prefill_chunk)
        if how is None:
            return cls(TOKENS, rows, guesses=False)
        drafter = None if how.draft is None else Drafter.load(how.draft, model, tokenizer)
        parts = model.limits.max_batch if how.branches else 0
        return cls(how.tokens, rows, drafter, parts=parts)

    def concerns(self, sequence: Sequence) -> bool:
        """Tokens may be drafted for it."""
        return sequence.request.speculate and (self._guesses or bool(sequence.request.prediction))

    def allot(self, sequences: List[Sequence], rows: int) -> list[tuple[Sequence, int]]:
        """How many tokens to draft for each of `sequences`, which are in a step that has `rows` without."""
        room = self.rows - rows
        willing = [
            (sequence, wanted)
            for sequence in sequences
            if self.concerns(sequence)
            and (wanted := min(sequence.credit.wanted(self._tokens), sequence.left - 1)) > 0
        ]
        wanted_in_all = sum(wanted for _, wanted in willing)
        room = self._prices.best(rows, min(room, wanted_in_all)) if room > 0 and willing else room
        found = []
        for left, (sequence, wanted) in zip(range(len(willing), 0, -1), willing, strict=True):
            count = min(wanted, room // left)
            room -= max(0, count)
            if count > 0:
                found.append((sequence, count))
        return found

    def propose(self, parts: List[tuple[Sequence, int]]) -> None:
        """Sets the drafts of sequences that have pages for that many more tokens."""
        open_parts = []
        for sequence, count in parts:
            sequence.draft = sequence.allowed(_predicted(sequence, count))
            if not sequence.draft and self._guesses:
                open_parts.append((sequence, count))
        if self._drafter is None:
            for sequence, count in open_parts:
                sequence.draft = sequence.lookup.propose(sequence.tokens, count)
        elif open_parts:
            self._draft(self._drafter, open_parts)
        for sequence, _ in open_parts:
            sequence.draft = sequence.allowed(sequence.draft)

    def spread(self, sequences: List[Sequence], rows: int, batch: int) -> None:
        """Sets branches of the drafts of `sequences`, in a step that has `rows` of `batch` sequences without
        drafts. Each gets as many tokens on them as are worth their share of the step's time."""
        drafted, branched = sum(len(sequence.draft) for sequence in sequences), 0
        pace = batch - len(sequences) + sum(sequence.odds.pace for sequence in sequences)
        for sequence in sequences if self._parts else ():
            room = min(self.rows - rows - drafted - branched, self._tokens - len(sequence.draft))
            if not sequence.draft or self._parts <= batch or room < 1:
                continue
            more = range(branched + 1, branched + 1 + min(room, BRANCHED))
            count = sequence.odds.wanted(pace, [self._prices.share(rows, drafted, each) for each in more])
            if count:
                found = self._others(sequence, count)
                sequence.branches = _fitting(sequence, found)[: self._parts - batch]
            batch, branched = batch + len(sequence.branches), branched + sequence.branched

    def _others(self, sequence: Sequence, count: int) -> list[Branch]:
        if not self._guesses:
            return []
        if self._drafter is None:
            return sequence.lookup.others(sequence.tokens, sequence.draft, count)
        return _doubtful(sequence, count)

    def settle(self, rows: int, drafts: List[Checked], seconds: float) -> None:
        """After a step of `rows` without drafts: what became of them, and how long it took."""
        drafted = sum(draft.drafted for draft in drafts)
        self._prices.observe(rows, drafted, seconds, sum(draft.branched for draft in drafts))
        price = self._prices.price(rows, drafted) if drafted else 0
        for sequence, count, accepted, branched, gained in drafts:
            if count:
                sequence.credit.settle(count, accepted, price, gained)
                sequence.odds.settle(branched, gained, 1 + accepted + gained)
            else:
                sequence.credit.rest()

    def prefilled(self, parts: List[tuple[Sequence, Part]]) -> None:
        """The model has taken in these; a draft model follows, so that its cache can be shared alike."""
        if self._drafter is not None:
            try:
                self._drafter.follow(parts)
            except Exception:  # whatever the library raises
                self._give_up()

    def _draft(self, drafter: Drafter, parts: List[tuple[Sequence, int]]) -> None:
        try:
            drafter.draft(parts)
        except Exception:  # whatever the library raises
            for sequence, _ in parts:
                sequence.draft = []
            self._give_up()

    def _give_up(self) -> None:
        """Answers do not need drafts."""
        log.exception("the draft bundle has failed and is not used any more")
        self._drafter = None


def _predicted(sequence: Sequence, count: int) -> list[int]:
    """What the client expects to come next."""
    request = sequence.request
    if not request.prediction:
        return []
    return sequence.prediction.propose(sequence.tokens[len(request.prompt) :], count)


def _fitting(sequence: Sequence, branches: List[Branch]) -> list[Branch]:
    """Branches of its draft as far as its constraint allows them."""
    found = []
    for branch in branches:
        before = sequence.draft[: branch.start]
        tokens = sequence.allowed([*before, *branch.tokens])[branch.start :]
        found += [Branch(branch.start, tokens)] * bool(tokens)
    return found


def _doubtful(sequence: Sequence, count: int) -> list[Branch]:
    """The most likely other tokens in those places where a draft model was least sure of its draft."""
    doubts = sequence.doubts[: len(sequence.draft)]
    places = sorted(range(len(doubts)), key=lambda place: doubts[place])
    return [Branch(place, [doubts[place][1]]) for place in places[:count]]


class Drafter:
    """A second, smaller model. Its cache has the model's pages: a token's keys and values have one place."""

    def __init__(self, model: Model, size: int) -> None:
        """`size`: of the vocabulary of the model that checks."""
        self._model, self._size = model, size

    @classmethod
    def load(cls, path: Path, model: Model, tokenizer: Tokenizer) -> Drafter:
        """Raises BundleError when it cannot be loaded or does not fit `model` and its tokenizer."""
        found = Model.load(path, model.threads)
        refused = refusal(model, found) or _other_tokens(model, tokenizer, found)
        if refused is not None:
            raise BundleError(f"{path} cannot draft for {model.manifest.name}: {refused}")
        found.pages = model.pages
        return cls(found, model.manifest.vocab_size)

    def follow(self, parts: List[tuple[Sequence, Part]]) -> None:
        """Takes in what the model has taken in."""
        fitting = [(sequence, part) for sequence, part in parts if self._fits(part[1])]
        if fitting:
            self._forward([part for _, part in fitting])
        for sequence, (_, end, _) in fitting:
            sequence.draft_length = end

    def draft(self, parts: List[tuple[Sequence, int]]) -> None:
        """Sets drafts, one token after the other for all sequences together."""
        going = self._caught_up([part for part in parts if self._fits(len(part[0].tokens) + part[1])])
        while going:
            rows = self._forward([self._part(sequence) for sequence, _ in going])
            more = []
            for (sequence, count), row in zip(going, rows, strict=True):
                sequence.draft_length = len(sequence.tokens) + len(sequence.draft)
                if sequence.guess(padded(row, self._size)) and len(sequence.draft) < count:
                    more.append((sequence, count))
            going = more

    def _fits(self, length: int) -> bool:
        return length <= self._model.limits.context_window

    def _part(self, sequence: Sequence) -> Part:
        known, size = sequence.draft_length, len(sequence.tokens)
        tokens = [*sequence.tokens[known:], *sequence.draft[max(0, known - size) :]]
        return tokens, size + len(sequence.draft), sequence.pages

    def _caught_up(self, parts: List[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Those whose tokens can be taken in at once. Others have rested; one of them gets a chunk."""
        room, found = self._model.limits.prefill_chunk, []
        for sequence, count in parts:
            sequence.draft_length = min(sequence.draft_length, sequence.length)
            missing = len(sequence.tokens) - sequence.draft_length
            if missing <= room:
                found.append((sequence, count))
                room -= missing
            elif room == self._model.limits.prefill_chunk:
                end = sequence.draft_length + room
                self._forward([(sequence.tokens[sequence.draft_length : end], end, sequence.pages)])
                sequence.draft_length = end
        return found

    def _forward(self, parts: List[Part]) -> Floats:
        """Logits float32 [len(parts), vocab] of the last tokens."""
        size, last = self._model.limits.page_size, self._model.manifest.vocab_size - 1
        known = [([min(token, last) for token in tokens], end, pages) for tokens, end, pages in parts]
        step = Step.of([(tokens, end, pages[: -(-end // size)]) for tokens, end, pages in known])
        return self._model.forward(step)


def fanned(sequences: List[Sequence], given: List[Part], size: int) -> Step:
    """A step with the branches of drafts: parts of their own, after that of their sequence in `given`, on
    pages of `size` tokens."""
    parts, wanted, forks = list[Part](), list[int](), list[Fork]()
    for sequence, part in zip(sequences, given, strict=True):
        more, found = draft_tree.parts(len(sequence.tokens), sequence.pages, sequence.branches, size)
        parts += [part, *more]
        wanted += [1 + len(sequence.draft), *[len(tokens) for tokens, _, _ in more]]
        forks += found
    return Step.of(parts, wanted, prompt=False)._replace(forks=forks)


def refusal(model: Model, draft: Model) -> str | None:
    """Why the limits of a draft bundle do not do for a model; None: they do."""
    ours, theirs = model.limits, draft.limits
    if ours.page_size != theirs.page_size:
        return f"its pages hold {theirs.page_size} tokens, not {ours.page_size}"
    for name in ("prefill_chunk", "max_batch"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if there < here:
            return f"it was compiled with {name} = {there}, and at least {here} is needed"
    return None


def _other_tokens(model: Model, tokenizer: Tokenizer, draft: Model) -> str | None:
    """The first difference between the vocabularies; None: there is none but in the padding at the end."""
    other = Tokenizer.of(draft.path, draft.manifest)
    sizes = model.manifest.vocab_size, draft.manifest.vocab_size
    for token in range(max(sizes)):
        names = [found.vocabulary.token_name(token) for found in (tokenizer, other)]
        if names[0] != names[1] or (names[0] and token >= min(sizes)):
            return (
                f"token {token} is {names[1]!r} there and {names[0]!r} here, with vocabularies of {sizes[1]}"
                f" and {sizes[0]} tokens; both need the same one"
            )
    return None


def padded(logits: Floats, size: int) -> Floats:
    """Logits for a vocabulary of another size: what is missing is impossible."""
    if len(logits) >= size:
        return logits[:size]
    return np.concatenate([logits, np.full(size - len(logits), -np.inf, np.float32)])
