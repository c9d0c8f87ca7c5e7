"""Tests of the schedule without an engine: which requests are admitted and preempted, and which pages they
have."""

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
    requests: Schedule, order: int, *prompt: int, priority: int = 0, window: int | None = None
) -> Sequence:
    """Adds a new waiting sequence to a schedule and returns it. prompt: its tokens; without any, five tokens
    that no other sequence has."""
    tokens = prompt or tuple(range(100 * order, 100 * order + 5))
    added, _ = sequence(Request(tokens, 9, priority=priority), window=window)
    added.order = order
    requests.add(added)
    return added


def rest(running: Sequence) -> None:
    """Delivers one event to a running sequence whose client may leave only one event unread, so that the
    sequence pauses until the client reads."""
    running.client.deliver(Event("a"))
    assert running.resting


def computed(requests: Schedule, *sequences: Sequence) -> None:
    """Marks the prompts of the given sequences as computed, as a step of the model would, and appends one
    token to each answer."""
    for each in sequences:
        requests.computed(each, len(each.request.prompt) - each.length)
        each.tokens.append(7)


def test_requests_are_sorted_by_priority_and_arrival() -> None:
    requests = schedule(0)
    third, second = waiting(requests, 3), waiting(requests, 2)
    first = waiting(requests, 4, priority=-1)
    assert requests.waiting == [first, second, third]


def test_a_request_is_admitted_with_pages_for_its_prompt() -> None:
    requests = schedule(8)
    only = waiting(requests, 1)
    requests.admit()
    assert (requests.active, requests.waiting, len(only.pages), requests.pages.available) == (
        [only],
        [],
        2,
        6,
    )
    assert (only.length, only.cached) == (0, 0)


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    requests = schedule(4)
    large, small = waiting(requests, 1, *range(20)), waiting(requests, 2, 1)
    requests.admit()
    assert requests.active == [] and requests.waiting == [large, small]


def test_each_running_request_keeps_a_page_free_for_its_answer() -> None:
    requests = schedule(4)
    first, second = waiting(requests, 1), waiting(requests, 2)
    requests.admit()
    assert requests.active == [first] and requests.waiting == [second]


def test_a_batch_has_a_limit() -> None:
    batch_requests = schedule(90, batch=2)
    requests = [waiting(batch_requests, order) for order in range(3)]
    batch_requests.admit()
    assert batch_requests.active == requests[:2] and batch_requests.waiting == requests[2:]


def test_a_resting_request_gives_its_place_to_a_waiting_one() -> None:
    requests = schedule(90, batch=1)
    first = waiting(requests, 1, window=1)
    requests.admit()
    second = waiting(requests, 2)
    requests.admit()
    assert requests.active == [first]
    rest(first)
    requests.admit()
    assert requests.active == [second] and requests.waiting == [first] and requests.preemptions == 1
    assert not requests.idle
    requests.remove(second)
    assert requests.idle


def test_full_pages_of_a_prompt_are_shared() -> None:
    requests = schedule(8)
    first = waiting(requests, 1, *range(9))
    requests.admit()
    requests.computed(first, 9)
    second = waiting(requests, 2, *range(8), 50)
    requests.admit()
    assert second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    assert (second.length, second.cached, requests.cached_tokens, second.draft.cached) == (8, 8, 8, 8)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    requests = schedule(8)
    first = waiting(requests, 1, *range(8))
    requests.admit()
    requests.computed(first, 8)
    second = waiting(requests, 2, *range(8))
    requests.admit()
    assert second.length == 4


def test_a_prompt_that_another_request_computes_is_waited_for() -> None:
    requests = schedule(90)
    first, second = waiting(requests, 1, *range(9)), waiting(requests, 2, *range(9))
    requests.admit()
    assert requests.waiting == [second]
    requests.computed(first, 9)
    requests.admit()
    assert requests.active == [first, second] and second.length == 8


def test_forgotten_pages_are_not_shared() -> None:
    requests = schedule(8)
    first = waiting(requests, 1, *range(9))
    requests.admit()
    requests.computed(first, 9)
    requests.remove(first, forget=True)
    assert first.pages == [] and requests.pages.available == 8 and requests.pages.cached == 0


def test_prompts_and_scored_prompts_have_steps_of_their_own() -> None:
    requests = schedule(90)
    plain = waiting(requests, 1)
    scored, _ = sequence(Request(tuple(range(SCORED + 10)), 9, prompt_logprobs=True))
    requests.add(scored)
    requests.admit()
    assert requests.prefills(3) == [(plain, 3)] and requests.scored(500) == [(scored, SCORED)]
    scored.length = SCORED
    assert requests.scored(500) == [(scored, 10)] and requests.scored(2) == [(scored, 2)]
    scored.length += 10
    assert requests.scored(500) == []


def test_a_decode_step_has_a_row_for_each_computed_prompt() -> None:
    requests = schedule(90)
    first, second, third = waiting(requests, 1), waiting(requests, 2, window=1), waiting(requests, 3)
    requests.admit()
    computed(requests, first, second)
    assert requests.decodes(8) == [(first, 1), (second, 1)] and third.prefilling
    rest(second)
    assert requests.decodes(8) == [(first, 1)]


def test_tokens_of_before_a_preemption_are_computed_many_at_a_time() -> None:
    requests = schedule(90)
    first, second = waiting(requests, 1), waiting(requests, 2)
    requests.admit()
    computed(requests, first, second)
    first.tokens += [1, 2, 3, 4]
    assert requests.decodes(4) == [(first, 3), (second, 1)]
    assert requests.decodes(99) == [(first, 5), (second, 1)]


def test_the_request_of_the_highest_rank_is_preempted_for_others() -> None:
    requests = schedule(5)
    first, second = waiting(requests, 1, *range(4)), waiting(requests, 2, *range(50, 54))
    requests.admit()
    computed(requests, first, second)
    requests.pages.take(3)
    assert requests.decodes(8) == [(first, 1)]
    assert (
        requests.waiting == [second]
        and second.pages == []
        and second.length == 0
        and requests.preemptions == 1
    )


def test_a_resting_request_is_preempted_first() -> None:
    requests = schedule(5)
    first, second = waiting(requests, 1, *range(4), window=1), waiting(requests, 2, *range(50, 54))
    requests.admit()
    computed(requests, first, second)
    rest(first)
    requests.pages.take(3)
    assert requests.decodes(8) == [(second, 1)] and requests.waiting == [first]


def test_stretching_preempts_nobody() -> None:
    requests = schedule(3)
    only = waiting(requests, 1)
    requests.admit()
    computed(requests, only)
    assert requests.stretch(only, 2) == 2 and len(only.pages) == 2
    assert requests.stretch(only, 50) == 6 and len(only.pages) == 3 and requests.preemptions == 0


def test_trimming_keeps_the_pages_of_the_tokens() -> None:
    requests = schedule(5)
    only = waiting(requests, 1)
    requests.admit()
    only.pages += requests.pages.take(2) or []
    requests.trim(only)
    assert len(only.pages) == 2 and requests.pages.available == 3


def with_branches(requests: Schedule, *branches: Branch) -> Sequence:
    only = waiting(requests, 1)
    requests.admit()
    computed(requests, only)
    only.draft.tokens, only.draft.branches = [1, 2, 3], list(branches)
    requests.stretch(only, 3)
    return only


def test_branches_get_pages_of_their_own() -> None:
    requests = schedule(8)
    only = with_branches(requests, Branch(1, [4, 5]), Branch(2, [6]))
    requests.branch(only)
    first, second = only.draft.branches
    # Six tokens and the draft's first: the branch begins in the second page.
    assert (first.shared, len(first.pages), second.shared, len(second.pages)) == (1, 2, 2, 1)
    assert requests.pages.available == 8 - 3 - 3


def test_branches_without_pages_are_dropped() -> None:
    requests = schedule(4)
    only = with_branches(requests, Branch(2, [6]), Branch(1, [4, 5]), Branch(0, [8]))
    requests.branch(only)
    assert [branch.tokens for branch in only.draft.branches] == [[6]] and requests.pages.available == 0


@pytest.mark.parametrize(("path", "cached"), [(0, 12), (1, 4)])
def test_only_the_accepted_path_keeps_its_pages(path: int, cached: int) -> None:
    requests = schedule(8)
    only = with_branches(requests, Branch(1, [4, 5]))
    requests.branch(only)
    trunk, branch = list(only.pages), list(only.draft.branches[0].pages)
    only.draft.best_path, only.draft.cached = path, 50
    requests.prune(only)
    assert only.pages == (trunk[:1] + branch if path else trunk)
    assert requests.pages.available == 8 - 3
    assert (only.draft.branches, only.draft.best_path, only.draft.cached) == ([], 0, cached)


def test_pages_outside_of_the_window_are_freed() -> None:
    requests = schedule(8, window=5)
    only = waiting(requests, 1, *range(20))
    requests.admit()
    requests.computed(only, 12)
    assert only.pages[:2] == [GONE, GONE] and GONE not in only.pages[2:]
    requests.computed(only, 1)
    assert only.pages[:2] == [GONE, GONE] and only.pages[2] != GONE
    before = requests.pages.available
    requests.remove(only)
    assert requests.pages.available == before + 3


def test_a_request_that_is_removed_frees_everything() -> None:
    requests = schedule(8)
    only = with_branches(requests, Branch(1, [4, 5]))
    requests.branch(only)
    requests.remove(only)
    assert requests.active == requests.waiting == [] and only.pages == [] and requests.pages.available == 8
    waiting(requests, 2)
    requests.remove(requests.waiting[0])
    assert requests.waiting == []


def test_a_request_of_no_tokens_of_answer_fits_too() -> None:
    requests = schedule(1)
    only, _ = sequence(replace(Request((1, 2, 3)), max_tokens=0))
    requests.add(only)
    requests.admit()
    assert requests.active == [only]
