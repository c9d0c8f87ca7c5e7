"""Tests of the draft state of one sequence, such as the number of tokens that a step verifies."""

from __future__ import annotations

from mlcbuild_runtime.engine.draft_state import DraftState
from mlcbuild_runtime.engine.draft_tree import Branch


def test_a_draft_counts_its_branches() -> None:
    state = DraftState((5, 6))
    assert (state.size, state.branched) == (0, 0)
    state.tokens = [1, 2, 3]
    state.branches = [Branch(1, [4, 5]), Branch(0, [6])]
    assert (state.size, state.branched) == (6, 3)


def test_states_share_nothing() -> None:
    one, two = DraftState(()), DraftState(())
    one.tokens.append(1)
    one.branches.append(Branch(0, [2]))
    one.doubts.append((0.5, 3))
    one.credit.balance += 7
    assert not two.tokens and not two.branches and not two.doubts
    assert two.credit.balance == DraftState(()).credit.balance
