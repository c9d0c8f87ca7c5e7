"""Decides which requests run, and which pages of the KV cache they use. It knows neither threads nor the
model."""

from __future__ import annotations

from bisect import insort

from mlcbuild_runtime.engine import draft_tree, prompt_turns
from mlcbuild_runtime.engine.pages import GONE, Pages
from mlcbuild_runtime.engine.sequence import Sequence

SCORED = 64
"""Maximum number of prompt tokens whose log-probabilities are computed in one step. Their logits take 33 MB
with 128,256 words (64 rows of float32), and the head's products for them 27 % of what the layers of
Llama-3.2-1B compute; `ci/bench/constants --bundle BUNDLE scheduler.SCORED` compares other numbers."""


class Schedule:
    """The waiting and the running requests, both sorted by rank: the lowest priority number goes first, then
    the earliest arrival.

    A request is admitted when the batch has a place, and when there are KV cache pages for all its tokens so
    far, and one more for each running request. Pages for the answer are allocated as it grows. When no page
    is left, the last running request is preempted, if possible one that is paused until its client has read
    events: it frees its pages and waits again. Its computed pages stay in the prefix cache until they are
    needed; the rest is computed again. The first request is not preempted for others unless it is paused, so
    that all requests finish."""

    def __init__(self, pages: Pages, page_size: int, max_batch: int, window: int | None = None) -> None:
        """Creates a schedule without requests. pages: the pages of the KV cache; page_size: number of tokens
        in a page; max_batch: maximum number of running requests; window: the longest attention window of the
        model in tokens, None if it is unlimited."""
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []
        self.pages, self.preemptions, self.cached_tokens = pages, 0, 0
        self._page_size, self._max_batch, self._window = page_size, max_batch, window

    @property
    def idle(self) -> bool:
        """Returns True if every request is paused until its client reads events, or there is none."""
        return all(sequence.resting for sequence in [*self.active, *self.waiting])

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda other: other.rank)

    def remove(self, sequence: Sequence, forget: bool = False) -> None:
        """Removes a waiting or running request, and frees its batch slot and KV cache pages. forget: True if
        its pages that no other request uses must also leave the prefix cache, except those that the cached
        pages of another prompt follow."""
        for listed in (self.active, self.waiting):
            if sequence in listed:
                listed.remove(sequence)
        self.prune(sequence)
        self.pages.release(sequence.pages, forget)
        sequence.pages = []

    def admit(self) -> None:
        """Admits waiting requests in the order of priority, then of arrival, as long as there are places in
        the batch and KV cache pages; paused running requests are preempted to provide them. Requests that are
        paused, or whose prompt shares pages that a running request computes now, are skipped; a request that
        waits for pages is not overtaken."""
        if len(self.active) >= self._max_batch and not any(s.resting for s in self.active):
            return
        for sequence in list(self.waiting):
            if sequence.resting or self._is_computed_elsewhere(sequence):
                continue
            while not self._place(sequence):
                resting = [other for other in self.active if other.resting]
                if not resting:
                    return
                self._preempt(resting[-1])
            insort(self.active, sequence, key=lambda other: other.rank)
            self.waiting.remove(sequence)

    def prefills(self, room: int) -> list[tuple[Sequence, int]]:
        """Returns (sequence, number of prompt tokens to compute now) for running sequences whose prompt is
        not computed yet, except those with log-probabilities of the prompt, and those for which no tokens are
        left of `room`, the maximum number of tokens together."""
        prompts = [s for s in self.active if s.prefilling and not s.request.prompt_logprobs]
        left = [(s.request.priority, len(s.request.prompt) - s.length) for s in prompts]
        counts = prompt_turns.allot(left, room)
        return [(sequence, count) for sequence, count in zip(prompts, counts, strict=True) if count]

    def scored(self, room: int) -> list[tuple[Sequence, int]]:
        """Returns [(sequence, number of prompt tokens to compute)] for the first running sequence whose
        prompt needs log-probabilities and is not computed yet; [] if there is none. room: maximum number of
        tokens to compute; a number above 64 (SCORED) counts as 64.

        It gets a separate step: kernels may round many rows' logits differently, which must not change other
        answers."""
        for sequence in self.active:
            if sequence.prefilling and sequence.request.prompt_logprobs:
                return [(sequence, min(room, SCORED, len(sequence.request.prompt) - sequence.length))]
        return []

    def decodes(self, rows: int) -> list[tuple[Sequence, int]]:
        """Returns (sequence, number of tokens to compute) for each sequence of the coming decode step, after
        allocating pages for these tokens. If pages are short, requests are preempted, paused ones first, then
        those that rank last by priority and arrival. A sequence that is preempted itself is left out, and so
        are those whose prompt is not computed yet, and paused ones.

        The number is 1, without draft tokens. A sequence that was preempted earlier computes several of its
        old tokens again, as long as the step has at most `rows` rows and there are pages without a
        preemption.
        """
        parts = []
        for sequence in list(self.active):
            ready = not sequence.prefilling and not sequence.resting
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
        """Allocates KV cache pages for the next token of a sequence and up to `count` more after it, without
        preempting a request. Returns the number of these further tokens for which there are pages, which may
        be less than `count`; -1 if there is none even for the next token."""
        while len(sequence.pages) * self._page_size <= sequence.length + count:
            more = self.pages.take(1)
            if more is None:
                break
            sequence.pages += more
        return min(count, len(sequence.pages) * self._page_size - sequence.length - 1)

    def branch(self, sequence: Sequence) -> None:
        """Allocates KV cache pages for the branches of a sequence's draft without preempting a request; drops
        the first branch for which there are too few pages, and all after it."""
        branches = sequence.draft.branches
        for place, branch in enumerate(branches):
            begin, size = len(sequence.tokens) + branch.start, self._page_size
            branch.shared = begin // size
            branch_pages = self.pages.take(-(-(begin + len(branch.tokens)) // size) - branch.shared)
            if branch_pages is None:
                del branches[place:]
                return
            branch.pages = branch_pages

    def prune(self, sequence: Sequence) -> None:
        """Ends a sequence's draft tree (the draft and its branches): frees its KV cache pages except those of
        the path that the last step accepted (`draft.best_path`), which become the sequence's; no keys or
        values are copied."""
        draft = sequence.draft
        if not draft.branches:
            return
        trunk, branch_pages = sequence.pages, [page for branch in draft.branches for page in branch.pages]
        accepted = draft_tree.path_pages(trunk, draft.branches, draft.best_path)
        accepted_pages = set(accepted)
        self.pages.release([page for page in (*trunk, *branch_pages) if page not in accepted_pages])
        draft.branches, draft.best_path, sequence.pages = [], 0, accepted
        # The draft model has computed the draft, but no branch.
        common = sum(old == new for old, new in zip(trunk, accepted, strict=False))
        draft.cached = min(draft.cached, common * self._page_size)

    def trim(self, sequence: Sequence) -> None:
        """Frees the KV cache pages of a sequence beyond those of its tokens, which only rejected draft tokens
        needed."""
        needed = -(-len(sequence.tokens) // self._page_size)
        self.pages.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def computed(self, sequence: Sequence, count: int) -> None:
        """Records that `count` more tokens of a sequence are in the KV cache, puts the full pages of its
        prompt into the prefix cache, and frees pages that have left the attention window."""
        before = sequence.length
        sequence.length += count
        if before < len(sequence.request.prompt):
            length = min(sequence.length, len(sequence.request.prompt))
            self.pages.keep(sequence.keys(self._page_size, length), sequence.pages)
        if self._window is not None:
            self._leave_window(sequence, max(0, sequence.length - self._window + 1) // self._page_size)

    def _leave_window(self, sequence: Sequence, count: int) -> None:
        """Frees the first `count` pages of a sequence, which are outside the attention window of all future
        tokens, and puts GONE into their places of its list; those that were freed before are skipped."""
        first = count
        while first and sequence.pages[first - 1] != GONE:
            first -= 1
        self.pages.release(sequence.pages[first:count])
        sequence.pages[first:count] = [GONE] * (count - first)

    def _place(self, sequence: Sequence) -> bool:
        """Allocates KV cache pages for all tokens of a waiting sequence, sharing those of the prefix cache.
        Returns False, with nothing allocated, if there is no place in the batch, or there are too few pages:
        one for each running request must remain."""
        if len(self.active) >= self._max_batch:
            return False
        # At least one token must be computed, because the next one is sampled from its logits.
        shared = self.pages.share(sequence.keys(self._page_size, len(sequence.tokens) - 1))
        needed = max(0, -(-len(sequence.tokens) // self._page_size) - len(shared))
        new_pages = self.pages.take(needed) if needed + len(self.active) <= self.pages.available else None
        if new_pages is None:
            self.pages.release(shared)
            return False
        sequence.pages = shared + new_pages
        sequence.length = len(shared) * self._page_size
        sequence.draft.cached = min(sequence.length, len(sequence.request.prompt))
        if sequence.cached is None:
            sequence.cached = sequence.length
            self.cached_tokens += sequence.length
        return True

    def _is_computed_elsewhere(self, sequence: Sequence) -> bool:
        """Returns True if a running request will compute pages that this waiting request can share, so that
        it should wait for them."""
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
        """Allocates the KV cache page for a sequence's next token, if it needs one, preempting other requests
        if necessary. Returns False if the sequence itself was preempted.
        """
        while len(sequence.pages) * self._page_size <= sequence.length:
            more = self.pages.take(1)
            if more is not None:
                sequence.pages += more
                continue
            resting = [other for other in self.active if other.resting]
            victim = resting[-1] if resting else self.active[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Frees the pages of a running request and makes it wait again, without losing tokens of its answer;
        the full pages stay in the prefix cache until they are needed."""
        self.pages.keep(sequence.keys(self._page_size, sequence.length), sequence.pages)
        self.pages.release(sequence.pages)
        sequence.pages, sequence.length = [], 0
        self.preemptions += 1
        self.add(sequence)
        self.active.remove(sequence)
