"""Tests of draft trees as lists of tokens and pages, without a sequence.

Most tests use this tree: the draft has the tokens 1 2 3; a branch with the tokens 4 5 leaves it after 1; and
a branch with the token 6 leaves the first branch after 4.
"""

from __future__ import annotations

from mlcbuild_runtime.engine.draft_tree import Branch, children, parts, path_pages, path_tokens, rows

DRAFT = [1, 2, 3]


def branches() -> list[Branch]:
    return [Branch(1, [4, 5]), Branch(2, [6], parent=1)]


def test_a_path_is_the_tokens_before_its_branches_and_theirs() -> None:
    assert [path_tokens(DRAFT, branches(), index) for index in range(3)] == [DRAFT, [1, 4, 5], [1, 4, 6]]


def test_rows_are_numbered_path_by_path() -> None:
    assert rows(DRAFT, branches()) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_children_lead_from_each_row_to_the_rows_of_its_successors() -> None:
    assert children(DRAFT, branches()) == [{1: 1}, {2: 2, 4: 4}, {3: 3}, {}, {5: 5, 6: 6}, {}, {}]


def test_a_branch_may_continue_behind_the_end_of_a_path() -> None:
    assert children([1], [Branch(1, [2])]) == [{1: 1}, {2: 2}, {}]


def test_of_two_equal_successors_the_earlier_row_counts() -> None:
    assert children([1, 2], [Branch(0, [1, 9])])[0] == {1: 1}


def test_pages_of_a_path_are_those_shared_and_its_own() -> None:
    branches = [Branch(1, [4, 5], shared=1, pages=[20, 21]), Branch(2, [6], parent=1, shared=2, pages=[30])]
    trunk = [10, 11, 12]
    assert [path_pages(trunk, branches, i) for i in range(3)] == [trunk, [10, 20, 21], [10, 20, 30]]


def test_a_branch_within_a_page_begins_with_a_copy_of_it() -> None:
    branches = [Branch(1, [4, 5], shared=1, pages=[20, 21])]
    # Five tokens and one of the draft: the branch leaves two tokens into the second page of four.
    assert parts(5, [10, 11, 12], branches, 4) == ([([4, 5], 8, [10, 20, 21])], [(11, 20, 2)])


def test_a_branch_at_the_start_of_a_page_copies_nothing() -> None:
    branches = [Branch(3, [4], shared=2, pages=[20])]
    assert parts(5, [10, 11, 12], branches, 4) == ([([4], 9, [10, 11, 20])], [])
