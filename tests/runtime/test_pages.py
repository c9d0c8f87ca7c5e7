"""Tests of the pages of the KV cache, compared with a simple model of their contents."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from mlcbuild_runtime.engine.pages import GONE, Key, Pages

A, B, C = (1,), (2,), (3,)


def test_what_one_leaves_another_shares() -> None:
    pages = Pages(4)
    mine = pages.take(3)
    assert mine is not None
    pages.keep([A, B], mine)
    assert (pages.available, pages.cached, pages.depth([A, B, C])) == (1, 2, 2)
    assert pages.share([A, B, C]) == mine[:2]
    pages.release(mine)
    assert pages.available == 2  # two are still shared
    pages.release(mine[:2])
    assert (pages.available, pages.cached) == (4, 2)


def test_the_least_recently_used_leaf_goes_first() -> None:
    pages = Pages(4)
    for keys in ([A, B], [C]):
        taken = pages.take(len(keys))
        assert taken is not None
        pages.keep(keys, taken)
        pages.release(taken)
    pages.release(pages.share([A, B]))  # now C is older
    assert pages.take(1) is not None
    assert (pages.depth([C]), pages.depth([A, B])) == (1, 2)
    assert pages.take(1) is not None
    assert (pages.depth([C]), pages.depth([A, B])) == (0, 2)
    assert pages.take(1) is not None
    assert pages.depth([A, B]) == 1
    assert pages.take(2) is None


def test_pages_are_used_again_before_new_ones() -> None:
    pages = Pages(8)
    assert pages.reached == 0
    first = pages.take(2)
    assert first == [0, 1] and pages.reached == 2
    pages.release(first)
    again = pages.take(3)
    assert again is not None and sorted(again) == [0, 1, 2] and pages.reached == 3
    assert pages.take(0) == [] and pages.take(6) is None and pages.reached == 3


def test_equal_pages_become_one() -> None:
    pages = Pages(4)
    first, second = pages.take(2), pages.take(2)
    assert first is not None and second is not None
    pages.keep([A], first)
    pages.keep([A, B], second)
    assert second[0] == first[0]
    assert pages.available == 1
    pages.release(first)
    pages.release(second)
    assert (pages.available, pages.cached) == (4, 2)


def test_what_is_to_be_forgotten_is_not_found() -> None:
    pages = Pages(3)
    mine = pages.take(2)
    assert mine is not None
    pages.keep([A, B], mine)
    pages.share([A])
    pages.release(mine, forget=True)
    assert (pages.depth([A, B]), pages.cached) == (1, 1)  # another still uses the first


def test_below_a_page_that_is_given_away_nothing_is_found() -> None:
    pages = Pages(4)
    mine = pages.take(3)
    assert mine is not None
    pages.keep([A, B, C], mine)
    pages.release(mine[:1])
    assert (pages.available, pages.depth([A, B, C])) == (2, 3)  # it may still be shared
    assert pages.take(2) is not None
    assert (pages.available, pages.depth([A, B, C])) == (0, 0)
    pages.keep([A, B, C], [GONE, *mine[1:]])
    assert pages.depth([A]) == 0
    pages.release([GONE, *mine[1:]])
    assert (pages.available, pages.cached) == (2, 0)


KEYS = st.lists(st.sampled_from([A, B]), min_size=1, max_size=4)


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(KEYS, st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=30))
def test_any_history(steps: list[tuple[list[Key], int, int, bool]]) -> None:
    """Checks that, after any sequence of operations, no page is allocated to two sequences that write
    different contents, even if sequences release their first pages before they put others into the prefix
    tree."""
    pages = Pages(9)
    holds: dict[int, tuple[Key, ...]] = {}
    running: list[list[int]] = []
    for keys, extra, gone, end in steps:
        shared = pages.share(keys)
        assert [holds[page] for page in shared] == [tuple(keys[: i + 1]) for i in range(len(shared))]
        new_pages = pages.take(len(keys) - len(shared) + extra)
        if new_pages is None:
            pages.release(shared)
        else:
            mine = shared + new_pages
            assert not set(new_pages) & {page for other in running for page in other} - {GONE}
            for i in range(len(shared), len(keys)):
                holds[mine[i]] = tuple(keys[: i + 1])
            pages.keep(keys[:2], mine)
            pages.release(mine[:gone])
            mine[:gone] = [GONE] * len(mine[:gone])
            pages.keep(keys, mine)
            running.append(mine)
        if running and (end or new_pages is None):
            pages.release(running.pop(0))
        in_use = {page for other in running for page in other} - {GONE}
        assert pages.available == 9 - len(in_use)
    for mine in running:
        pages.release(mine)
    assert pages.available == 9
    assert pages.take(9) is not None and pages.cached == 0
