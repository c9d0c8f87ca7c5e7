"""Defines draft trees: draft tokens and alternatives to them, all verified in the same step.

A draft is one path of tokens on the sequence's KV cache pages. A branch begins after a token of the draft or
of an earlier branch, and continues it with other tokens. A step computes it like another sequence: it attends
to the same full pages up to the point where it begins, and then to separate pages, the first of which begins
with a copy of the partly filled page at that point. So no attention mask is needed, and a branch's rows have
the same bits as without a tree. The idea is from SpecInfer (Miao et al., 2024, arXiv:2305.09781), which
separates paths with a mask.

The rows of a tree, in order: the token before the draft, the draft's tokens, the tokens of each branch.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

Part = tuple[List[int], int, List[int]]
"""The tokens of one sequence that a step computes: (ids of the new tokens, length of the sequence in tokens
with these included, numbers of the sequence's KV cache pages in order)."""
Fork = tuple[int, int, int]
"""A copy of the first tokens of a KV cache page to another page: (source page, destination page, number of
tokens).
"""


@dataclass(eq=False)
class Branch:
    """A branch of a draft tree: draft tokens that are an alternative to those of the draft or of an earlier
    branch."""

    start: int
    """Position at which this branch of a draft tree begins: the number of draft tokens before it, counted
    from the beginning of the draft. 0: it is an alternative to the whole draft."""
    tokens: list[int]
    """The draft tokens of this branch of the draft tree, at least one."""
    parent: int = 0
    """Index of the path in the draft tree that this branch continues: 0 is the draft itself, 1 the first
    branch. The branch begins after one of the draft tokens of that path, or before all of them."""
    shared: int = 0
    """Number of full KV cache pages, counted from the start of the sequence, that this branch of a draft tree
    shares with the path (the draft or an earlier branch) after whose token it begins."""
    pages: list[int] = field(default_factory=list)
    """Numbers of the KV cache pages that only this branch of a draft tree uses, in order; its sequence
    continues on them after the shared pages."""


def path_tokens(draft: list[int], branches: List[Branch], index: int) -> list[int]:
    """Returns all draft tokens of a draft tree from the draft's beginning to the end of the path `index`: 0
    is the draft itself, 1 the first branch."""
    if not index:
        return draft
    branch = branches[index - 1]
    return path_tokens(draft, branches, branch.parent)[: branch.start] + branch.tokens


def path_pages(trunk: list[int], branches: List[Branch], index: int) -> list[int]:
    """Returns the numbers of the KV cache pages of the path `index` of a draft tree, in order: 0 is the draft
    itself, 1 the first branch. trunk: the pages of the sequence."""
    if not index:
        return trunk
    branch = branches[index - 1]
    return path_pages(trunk, branches, branch.parent)[: branch.shared] + branch.pages


def rows(draft: List[int], branches: List[Branch]) -> list[tuple[int, int]]:
    """Returns (index of a path, depth) for each row of logits of a draft tree. The rows are that of the token
    before the draft, which is (0, 0), those of the draft's tokens, then those of each branch's tokens. The
    path is the one that holds the row's token: 0 is the draft itself, 1 the first branch. The depth is the
    number of draft tokens from the draft's beginning along the path to the row's token, that token included.
    """
    path_rows = [(0, depth) for depth in range(len(draft) + 1)]
    for index, branch in enumerate(branches, 1):
        path_rows += [(index, branch.start + i) for i in range(1, len(branch.tokens) + 1)]
    return path_rows


def children(draft: List[int], branches: List[Branch]) -> list[dict[int, int]]:
    """Returns one mapping for each row of logits of a draft tree: draft token that may follow the row's token
    -> index of the following token's row. It is empty for a token that no draft token follows."""
    successors: list[dict[int, int]] = [{token: row} for row, token in enumerate(draft, 1)]
    successors.append({})
    starts = [0]
    """For each path of a draft tree (the draft, then the branches): index of a token's row of logits minus
    the token's depth, which is the number of draft tokens from the draft's beginning to the token, that token
    included. For a branch, the difference holds only for the branch's own tokens: the tokens before them have
    their rows on the paths that the branch continues."""
    for branch in branches:
        row = len(successors)
        leaves = successors[starts[branch.parent] + branch.start]
        starts.append(row - branch.start - 1)
        for token in branch.tokens:
            leaves.setdefault(token, row)
            leaves = {}
            successors.append(leaves)
            row += 1
    return successors


def parts(length: int, trunk: list[int], branches: List[Branch], size: int) -> tuple[list[Part], list[Fork]]:
    """Returns two lists with the inputs that the branches of one sequence's draft add to a step. The first
    has for each branch (tokens, length of the sequence after them, KV cache pages); the step computes a
    branch like another sequence. The second has, for each branch that does not begin at the start of a page,
    the copy of the tokens before it in that page: (source page, destination page, number of tokens).

    length: number of tokens of the sequence, without draft tokens; trunk: its pages; size: number of tokens
    in a page.
    """
    parts, forks = list[Part](), list[Fork]()
    for branch in branches:
        begin = length + branch.start
        where = path_pages(trunk, branches, branch.parent)
        parts.append((branch.tokens, begin + len(branch.tokens), where[: branch.shared] + branch.pages))
        if begin % size:
            forks.append((where[branch.shared], branch.pages[0], begin % size))
    return parts, forks
