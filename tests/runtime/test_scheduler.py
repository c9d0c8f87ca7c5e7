"""The schedule without an engine: who is admitted, who gives way, and which pages everyone has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mlcbuild_runtime.engine.draft_tree import Branch
from mlcbuild_runtime.engine.pages import GONE, Pages
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.engine.scheduler import SCORED, Schedule
from mlcbuild_runtime.engine.sequence import Sequence

from .scripted import sequence

SIZE = 4


def schedule(pages: int, batch: int = 8, window: int | None = None) -> Schedule:
    return Schedule(Pages(pages), SIZE, batch, window)


def waiting(
    own: Schedule, order: int, *prompt: int, priority: int = 0, window: int | None = None
) -> Sequence:
    """Returns a new sequence of the schedule; without tokens its prompt is five tokens of its own."""
    tokens = prompt or tuple(range(100 * order, 100 * order + 5))
    added, _ = sequence(Request(tokens, 9, priority=priority), window=window)
    added.order = order
    own.add(added)
    return added


def rest(own: Sequence) -> None:
    """Makes a sequence with a window of one event wait for its client."""
    own.client.deliver(Event("a"))
    assert own.resting


def computed(own: Schedule, *sequences: Sequence) -> None:
    """Marks the prompts as computed, and appends a token to each answer."""
    for each in sequences:
        own.computed(each, len(each.request.prompt) - each.length)
        each.tokens.append(7)


def test_requests_are_sorted_by_priority_and_arrival() -> None:
    own = schedule(0)
    third, second = waiting(own, 3), waiting(own, 2)
    first = waiting(own, 4, priority=-1)
    assert own.waiting == [first, second, third]


def test_a_request_is_admitted_with_pages_for_its_prompt() -> None:
    own = schedule(8)
    only = waiting(own, 1)
    own.admit()
    assert (own.active, own.waiting, len(only.pages), own.pages.available) == ([only], [], 2, 6)
    assert (only.length, only.cached) == (0, 0)


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    own = schedule(4)
    large, small = waiting(own, 1, *range(20)), waiting(own, 2, 1)
    own.admit()
    assert own.active == [] and own.waiting == [large, small]


def test_each_running_request_keeps_a_page_free_for_its_answer() -> None:
    own = schedule(4)
    first, second = waiting(own, 1), waiting(own, 2)
    own.admit()
    assert own.active == [first] and own.waiting == [second]


def test_a_batch_has_a_limit() -> None:
    own = schedule(90, batch=2)
    requests = [waiting(own, order) for order in range(3)]
    own.admit()
    assert own.active == requests[:2] and own.waiting == requests[2:]


def test_a_resting_request_gives_its_place_to_a_waiting_one() -> None:
    own = schedule(90, batch=1)
    first = waiting(own, 1, window=1)
    own.admit()
    second = waiting(own, 2)
    own.admit()
    assert own.active == [first]
    rest(first)
    own.admit()
    assert own.active == [second] and own.waiting == [first] and own.preemptions == 1
    assert not own.idle
    own.remove(second)
    assert own.idle


def test_full_pages_of_a_prompt_are_shared() -> None:
    own = schedule(8)
    first = waiting(own, 1, *range(9))
    own.admit()
    own.computed(first, 9)
    second = waiting(own, 2, *range(8), 50)
    own.admit()
    assert second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    assert (second.length, second.cached, own.cached_tokens, second.draft.cached) == (8, 8, 8, 8)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    own = schedule(8)
    first = waiting(own, 1, *range(8))
    own.admit()
    own.computed(first, 8)
    second = waiting(own, 2, *range(8))
    own.admit()
    assert second.length == 4


def test_a_prompt_that_another_request_computes_is_waited_for() -> None:
    own = schedule(90)
    first, second = waiting(own, 1, *range(9)), waiting(own, 2, *range(9))
    own.admit()
    assert own.waiting == [second]
    own.computed(first, 9)
    own.admit()
    assert own.active == [first, second] and second.length == 8


def test_forgotten_pages_are_not_shared() -> None:
    own = schedule(8)
    first = waiting(own, 1, *range(9))
    own.admit()
    own.computed(first, 9)
    own.remove(first, forget=True)
    assert first.pages == [] and own.pages.available == 8 and own.pages.cached == 0


def test_prompts_and_scored_prompts_have_steps_of_their_own() -> None:
    own = schedule(90)
    plain = waiting(own, 1)
    scored, _ = sequence(Request(tuple(range(SCORED + 10)), 9, prompt_logprobs=True))
    own.add(scored)
    own.admit()
    assert own.prefills(3) == [(plain, 3)] and own.scored(500) == [(scored, SCORED)]
    scored.length = SCORED
    assert own.scored(500) == [(scored, 10)] and own.scored(2) == [(scored, 2)]
    scored.length += 10
    assert own.scored(500) == []


def test_a_decode_step_has_a_row_for_each_computed_prompt() -> None:
    own = schedule(90)
    first, second, third = waiting(own, 1), waiting(own, 2, window=1), waiting(own, 3)
    own.admit()
    computed(own, first, second)
    assert own.decodes(8) == [(first, 1), (second, 1)] and third.prefilling
    rest(second)
    assert own.decodes(8) == [(first, 1)]


def test_tokens_of_before_a_preemption_are_computed_many_at_a_time() -> None:
    own = schedule(90)
    first, second = waiting(own, 1), waiting(own, 2)
    own.admit()
    computed(own, first, second)
    first.tokens += [1, 2, 3, 4]
    assert own.decodes(4) == [(first, 3), (second, 1)]
    assert own.decodes(99) == [(first, 5), (second, 1)]


def test_the_request_of_the_highest_rank_is_preempted_for_others() -> None:
    own = schedule(5)
    first, second = waiting(own, 1, *range(4)), waiting(own, 2, *range(50, 54))
    own.admit()
    computed(own, first, second)
    own.pages.take(3)
    assert own.decodes(8) == [(first, 1)]
    assert own.waiting == [second] and second.pages == [] and second.length == 0 and own.preemptions == 1


def test_a_resting_request_is_preempted_first() -> None:
    own = schedule(5)
    first, second = waiting(own, 1, *range(4), window=1), waiting(own, 2, *range(50, 54))
    own.admit()
    computed(own, first, second)
    rest(first)
    own.pages.take(3)
    assert own.decodes(8) == [(second, 1)] and own.waiting == [first]


def test_stretching_preempts_nobody() -> None:
    own = schedule(3)
    only = waiting(own, 1)
    own.admit()
    computed(own, only)
    assert own.stretch(only, 2) == 2 and len(only.pages) == 2
    assert own.stretch(only, 50) == 6 and len(only.pages) == 3 and own.preemptions == 0


def test_trimming_keeps_the_pages_of_the_tokens() -> None:
    own = schedule(5)
    only = waiting(own, 1)
    own.admit()
    only.pages += own.pages.take(2) or []
    own.trim(only)
    assert len(only.pages) == 2 and own.pages.available == 3


def with_branches(own: Schedule, *branches: Branch) -> Sequence:
    only = waiting(own, 1)
    own.admit()
    computed(own, only)
    only.draft.tokens, only.draft.branches = [1, 2, 3], list(branches)
    own.stretch(only, 3)
    return only


def test_branches_get_pages_of_their_own() -> None:
    own = schedule(8)
    only = with_branches(own, Branch(1, [4, 5]), Branch(2, [6]))
    own.branch(only)
    first, second = only.draft.branches
    # Six tokens and the draft's first: the branch begins in the second page.
    assert (first.shared, len(first.pages), second.shared, len(second.pages)) == (1, 2, 2, 1)
    assert own.pages.available == 8 - 3 - 3


def test_branches_without_pages_are_dropped() -> None:
    own = schedule(4)
    only = with_branches(own, Branch(2, [6]), Branch(1, [4, 5]), Branch(0, [8]))
    own.branch(only)
    assert [branch.tokens for branch in only.draft.branches] == [[6]] and own.pages.available == 0


@pytest.mark.parametrize(("path", "cached"), [(0, 12), (1, 4)])
def test_only_the_accepted_path_keeps_its_pages(path: int, cached: int) -> None:
    own = schedule(8)
    only = with_branches(own, Branch(1, [4, 5]))
    own.branch(only)
    trunk, branch = list(only.pages), list(only.draft.branches[0].pages)
    only.draft.best_path, only.draft.cached = path, 50
    own.prune(only)
    assert only.pages == (trunk[:1] + branch if path else trunk)
    assert own.pages.available == 8 - 3
    assert (only.draft.branches, only.draft.best_path, only.draft.cached) == ([], 0, cached)


def test_pages_outside_of_the_window_are_freed() -> None:
    own = schedule(8, window=5)
    only = waiting(own, 1, *range(20))
    own.admit()
    own.computed(only, 12)
    assert only.pages[:2] == [GONE, GONE] and GONE not in only.pages[2:]
    own.computed(only, 1)
    assert only.pages[:2] == [GONE, GONE] and only.pages[2] != GONE
    before = own.pages.available
    own.remove(only)
    assert own.pages.available == before + 3


def test_a_request_that_is_removed_frees_everything() -> None:
    own = schedule(8)
    only = with_branches(own, Branch(1, [4, 5]))
    own.branch(only)
    own.remove(only)
    assert own.active == own.waiting == [] and only.pages == [] and own.pages.available == 8
    waiting(own, 2)
    own.remove(own.waiting[0])
    assert own.waiting == []


def test_a_request_of_no_tokens_of_answer_fits_too() -> None:
    own = schedule(1)
    only, _ = sequence(replace(Request((1, 2, 3)), max_tokens=0))
    own.add(only)
    own.admit()
    assert own.active == [only]
