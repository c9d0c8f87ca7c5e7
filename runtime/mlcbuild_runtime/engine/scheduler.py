"""Which requests run, and on which pages. Knows neither threads nor the model."""

from __future__ import annotations

from bisect import insort

from mlcbuild_runtime.engine import draft_tree
from mlcbuild_runtime.engine.pages import GONE, Pages
from mlcbuild_runtime.engine.sequence import Sequence

SCORED = 64
"""Tokens of a prompt at most that get log-probabilities in one step: to make these takes as long again."""


class Schedule:
    """Requests that wait and requests that run, both by rank.

    A request is admitted when the pages for its prompt are there and one more for each that runs. Pages for
    the answer are taken as it grows. When there are none, the request of the highest rank gives its pages up
    and waits again (one whose client does not read goes first); what it had computed stays in the tree
    until the room is needed, the rest is computed again. The request of the lowest rank never loses its
    pages to others, so that all requests come to their end.
    """

    def __init__(self, pages: Pages, page_size: int, max_batch: int, window: int | None = None) -> None:
        """`window`: how many tokens the model looks back in all its layers; None: without limit."""
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []
        self.pages, self.preemptions, self.cached_tokens = pages, 0, 0
        self._page_size, self._max_batch, self._window = page_size, max_batch, window

    @property
    def idle(self) -> bool:
        """Nothing can be done before somebody outside acts."""
        return all(sequence.ticket.resting for sequence in [*self.active, *self.waiting])

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda other: other.rank)

    def remove(self, sequence: Sequence, forget: bool = False) -> None:
        """The end of a request. `forget`: nobody is to use what it has computed."""
        for listed in (self.active, self.waiting):
            if sequence in listed:
                listed.remove(sequence)
        self.prune(sequence)
        self.pages.release(sequence.pages, forget)
        sequence.pages = []

    def admit(self) -> None:
        """By rank; nobody overtakes a request that waits for pages."""
        if len(self.active) >= self._max_batch and not any(s.ticket.resting for s in self.active):
            return
        for sequence in list(self.waiting):
            if sequence.ticket.resting or self._is_computed_elsewhere(sequence):
                continue
            while not self._place(sequence):
                resting = [other for other in self.active if other.ticket.resting]
                if not resting:
                    return
                self._preempt(resting[-1])
            insort(self.active, sequence, key=lambda other: other.rank)
            self.waiting.remove(sequence)

    def prefills(self, room: int) -> list[tuple[Sequence, int]]:
        """Sequences that have not all of their prompt in the cache, and how many tokens to put there now."""
        parts = []
        for sequence in self.active:
            if sequence.prefilling and room and not sequence.request.prompt_logprobs:
                count = min(room, len(sequence.request.prompt) - sequence.length)
                parts.append((sequence, count))
                room -= count
        return parts

    def scored(self, room: int) -> list[tuple[Sequence, int]]:
        """As `prefills`, of the first sequence whose prompt's log-probabilities are wanted. It has a step of
        its own: kernels may round the logits of many rows otherwise, which is not to show in others'."""
        for sequence in self.active:
            if sequence.prefilling and sequence.request.prompt_logprobs:
                return [(sequence, min(room, SCORED, len(sequence.request.prompt) - sequence.length))]
        return []

    def decodes(self, rows: int) -> list[tuple[Sequence, int]]:
        """Sequences that take one token now; those that had to give their pages up, more of the tokens that
        they have already, as far as the step has no more than `rows`. Each has pages for them."""
        parts = []
        for sequence in list(self.active):
            ready = not sequence.prefilling and not sequence.ticket.resting
            if ready and sequence in self.active and self._grow(sequence):
                parts.append((sequence, 1))
        room = rows - len(parts)
        for i, (sequence, _) in enumerate(parts):
            more = max(0, min(room, len(sequence.tokens) - sequence.length - 1))
            more = self.stretch(sequence, more) if more else 0
            parts[i] = sequence, 1 + more
            room -= more
        return parts

    def stretch(self, sequence: Sequence, count: int) -> int:
        """Pages for a draft of `count` tokens, as far as nobody has to give any up; how many tokens fit."""
        while len(sequence.pages) * self._page_size <= sequence.length + count:
            more = self.pages.take(1)
            if more is None:
                break
            sequence.pages += more
        return min(count, len(sequence.pages) * self._page_size - sequence.length - 1)

    def branch(self, sequence: Sequence) -> None:
        """Pages for the branches of a draft, as far as nobody has to give any up; the others are dropped."""
        sequence.taken = 0
        for place, branch in enumerate(sequence.branches):
            begin, size = len(sequence.tokens) + branch.start, self._page_size
            branch.shared = begin // size
            own = self.pages.take(-(-(begin + len(branch.tokens)) // size) - branch.shared)
            if own is None:
                del sequence.branches[place:]
                return
            branch.pages = own

    def prune(self, sequence: Sequence) -> None:
        """Of a tree of drafts, the pages of the path that was taken stay; no keys or values are moved."""
        if not sequence.branches:
            return
        trunk, own = sequence.pages, [page for branch in sequence.branches for page in branch.pages]
        taken = draft_tree.path_pages(trunk, sequence.branches, sequence.taken)
        kept = set(taken)
        self.pages.release([page for page in (*trunk, *own) if page not in kept])
        sequence.branches, sequence.pages = [], taken
        # A draft model has taken in the draft, but no branch.
        common = sum(old == new for old, new in zip(trunk, taken, strict=False))
        sequence.draft_length = min(sequence.draft_length, common * self._page_size)

    def trim(self, sequence: Sequence) -> None:
        """Gives back the pages that only rejected drafts needed."""
        needed = -(-len(sequence.tokens) // self._page_size)
        self.pages.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def computed(self, sequence: Sequence, count: int) -> None:
        """`count` more tokens are in the cache; full pages of the prompt can now be shared."""
        before = sequence.length
        sequence.length += count
        if before < len(sequence.request.prompt):
            length = min(sequence.length, len(sequence.request.prompt))
            self.pages.keep(sequence.keys(self._page_size, length), sequence.pages)
        if self._window is not None:
            self._let_go(sequence, max(0, sequence.length - self._window + 1) // self._page_size)

    def _let_go(self, sequence: Sequence, count: int) -> None:
        """The first `count` pages are outside of the window of every token to come."""
        first = count
        while first and sequence.pages[first - 1] != GONE:
            first -= 1
        self.pages.release(sequence.pages[first:count])
        sequence.pages[first:count] = [GONE] * (count - first)

    def _place(self, sequence: Sequence) -> bool:
        """Gives a sequence the pages of all its tokens so far, if there is room for it."""
        if len(self.active) >= self._max_batch:
            return False
        # One token at least is left to feed: its logits are wanted.
        shared = self.pages.share(sequence.keys(self._page_size, len(sequence.tokens) - 1))
        needed = max(0, -(-len(sequence.tokens) // self._page_size) - len(shared))
        own = self.pages.take(needed) if needed + len(self.active) <= self.pages.available else None
        if own is None:
            self.pages.release(shared)
            return False
        sequence.pages = shared + own
        sequence.length = len(shared) * self._page_size
        sequence.draft_length = min(sequence.length, len(sequence.request.prompt))
        if sequence.cached is None:
            sequence.cached = sequence.length
            self.cached_tokens += sequence.length
        return True

    def _is_computed_elsewhere(self, sequence: Sequence) -> bool:
        """A running request is about to compute pages that this one could share: it pays to wait."""
        keys = sequence.keys(self._page_size, len(sequence.tokens) - 1)
        for other in self.active:
            if other.prefilling:
                theirs = other.keys(self._page_size, len(other.request.prompt))
                common = 0
                while common < min(len(keys), len(theirs)) and keys[common] == theirs[common]:
                    common += 1
                if common * self._page_size > other.length and common > self.pages.depth(keys):
                    return True
        return False

    def _grow(self, sequence: Sequence) -> bool:
        """A page for the next token, at the cost of others. False: the sequence itself had to go."""
        while len(sequence.pages) * self._page_size <= sequence.length:
            more = self.pages.take(1)
            if more is not None:
                sequence.pages += more
                continue
            resting = [other for other in self.active if other.ticket.resting]
            victim = resting[-1] if resting else self.active[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting; its pages may be taken now."""
        self.pages.keep(sequence.keys(self._page_size, sequence.length), sequence.pages)
        self.pages.release(sequence.pages)
        sequence.pages, sequence.length = [], 0
        self.preemptions += 1
        self.add(sequence)
        self.active.remove(sequence)
