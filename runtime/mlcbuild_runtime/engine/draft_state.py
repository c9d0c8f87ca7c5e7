"""Holds the state of speculative decoding for one sequence."""

from __future__ import annotations

from mlcbuild_runtime.engine.draft_tree import Branch
from mlcbuild_runtime.engine.drafts import Credit, Lookup, Odds, Prediction


class DraftState:
    """The draft tokens of one sequence for the coming step, and statistics of its earlier drafts."""

    def __init__(self, prediction: tuple[int, ...]) -> None:
        """Creates the state of speculative decoding for one sequence, which has no draft yet. prediction:
        tokens that the client expects in the answer, a source of draft tokens."""
        self.tokens: list[int] = []
        """Draft tokens of the sequence, which the next step verifies."""
        self.branches: list[Branch] = []
        """Branches of the draft: alternative draft tokens, which are verified in the same step."""
        self.best_path = 0
        """Index of the accepted path of the last draft tree: 0 is the draft itself, also if none of its
        tokens was accepted, 1 the first branch."""
        self.branch_gain = 0
        """Number of draft tokens on branches (alternatives to the draft) that the last step accepted."""
        self.cached = 0
        """Number of tokens, counted from the start of the sequence and with draft tokens included, whose keys
        and values are in the draft model's KV cache."""
        self.doubts: list[tuple[float, int]] = []
        """For each token of the present draft, in order, if a draft model proposed it: (its logit minus the
        largest logit of another token, that other token). The logits are the draft model's; the difference is
        negative if the other token is more likely. Without such a draft, the content is out of date and not
        used."""
        self.credit, self.odds = Credit(), Odds()
        self.lookup, self.prediction = Lookup(), Prediction(prediction)
        self.accepted = self.rejected = 0
        """Numbers of accepted and of rejected draft tokens, those on branches included, since the start of
        the answer."""

    @property
    def branched(self) -> int:
        """Returns the number of tokens on all branches of the sequence's draft."""
        return sum(len(branch.tokens) for branch in self.branches)

    @property
    def size(self) -> int:
        """Returns the number of tokens of the draft and of its branches together."""
        return len(self.tokens) + self.branched
