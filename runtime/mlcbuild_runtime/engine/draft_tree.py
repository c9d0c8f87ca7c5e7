"""Trees of drafted tokens: other ways on beside a draft, checked in the same step.

A draft is one path of tokens, on the sequence's own pages. A branch leaves it, or an earlier branch, and is
a part of its own in a step, as if it were another sequence: it looks at the same full pages up to where it
begins, and then at pages of its own, the first of which starts as a copy of what the page has that it left.
So no mask is needed, and rows of a branch are computed as they are without a tree, bit by bit. The idea of
drafts that are trees is from SpecInfer (Miao et al., 2024, arXiv:2305.09781), where a mask tells their paths
apart.

The rows of a tree, in order: the token before the draft, those of the draft, those of each branch.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

Part = tuple[List[int], int, List[int]]
"""(new tokens, length after them, pages) of a sequence in a step."""
Fork = tuple[int, int, int]
"""(from page, to page, tokens): what a branch's first page begins with."""


@dataclass(eq=False)
class Branch:
    """Drafted tokens beside others."""

    start: int
    """Drafted tokens before it, on the path that it leaves."""
    tokens: list[int]
    """At least one."""
    parent: int = 0
    """The path that it leaves: 0 is the draft, 1 the first branch. It begins on that path's own tokens, or
    behind the last of them."""
    shared: int = 0
    """Pages of that path that it looks at, too: the full ones before it."""
    pages: list[int] = field(default_factory=list)
    """Its own, after these."""


def path_tokens(draft: list[int], branches: List[Branch], index: int) -> list[int]:
    """All drafted tokens up to the end of a path; 0 is the draft itself."""
    if not index:
        return draft
    branch = branches[index - 1]
    return path_tokens(draft, branches, branch.parent)[: branch.start] + branch.tokens


def path_pages(trunk: list[int], branches: List[Branch], index: int) -> list[int]:
    """Of a whole path, for a sequence whose own pages are `trunk`."""
    if not index:
        return trunk
    branch = branches[index - 1]
    return path_pages(trunk, branches, branch.parent)[: branch.shared] + branch.pages


def rows(draft: List[int], branches: List[Branch]) -> list[tuple[int, int]]:
    """(path, drafted tokens up to here) of each row."""
    found = [(0, depth) for depth in range(len(draft) + 1)]
    for index, branch in enumerate(branches, 1):
        found += [(index, branch.start + i) for i in range(1, len(branch.tokens) + 1)]
    return found


def children(draft: List[int], branches: List[Branch]) -> list[dict[int, int]]:
    """For each row: drafted token after it -> row of that token."""
    found: list[dict[int, int]] = [{token: row} for row, token in enumerate(draft, 1)]
    found.append({})
    starts = [0]
    """Row of a path less the number of drafted tokens up to it."""
    for branch in branches:
        row = len(found)
        leaves = found[starts[branch.parent] + branch.start]
        starts.append(row - branch.start - 1)
        for token in branch.tokens:
            leaves.setdefault(token, row)
            leaves = {}
            found.append(leaves)
            row += 1
    return found


def parts(length: int, trunk: list[int], branches: List[Branch], size: int) -> tuple[list[Part], list[Fork]]:
    """What the branches of a sequence of `length` tokens add to a step, with pages of `size` tokens."""
    found, forks = list[Part](), list[Fork]()
    for branch in branches:
        begin = length + branch.start
        where = path_pages(trunk, branches, branch.parent)
        found.append((branch.tokens, begin + len(branch.tokens), where[: branch.shared] + branch.pages))
        if begin % size:
            forks.append((where[branch.shared], branch.pages[0], begin % size))
    return found, forks
