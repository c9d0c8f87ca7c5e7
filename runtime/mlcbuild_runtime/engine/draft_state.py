"""What speculative decoding keeps about one sequence."""

from __future__ import annotations

from mlcbuild_runtime.engine.draft_tree import Branch
from mlcbuild_runtime.engine.drafts import Credit, Lookup, Odds, Prediction


class DraftState:
    """The draft of the coming step, and what earlier drafts have shown."""

    def __init__(self, prediction: tuple[int, ...]) -> None:
        """prediction: tokens that the client expects in the answer."""
        self.tokens: list[int] = []
        """Tokens that may follow; the next step verifies them."""
        self.branches: list[Branch] = []
        """Alternatives, verified in the same step."""
        self.best_path = 0
        """The path of the last tree whose tokens were accepted: 0 is the draft, 1 the first branch."""
        self.branch_gain = 0
        """Accepted tokens of the last step that were on branches."""
        self.cached = 0
        """Tokens whose keys and values are in the cache of the draft model."""
        self.doubts: list[tuple[float, int]] = []
        """For each token of a draft model's draft: the distance of its logit to the second one, and which
        token that is."""
        self.credit, self.odds = Credit(), Odds()
        self.lookup, self.prediction = Lookup(), Prediction(prediction)
        self.accepted = self.rejected = 0
        """Drafted tokens since the start of the answer."""

    @property
    def branched(self) -> int:
        """Tokens on branches."""
        return sum(len(branch.tokens) for branch in self.branches)

    @property
    def size(self) -> int:
        """Tokens of the draft and of its branches."""
        return len(self.tokens) + self.branched
