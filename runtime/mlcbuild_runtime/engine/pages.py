"""Who holds the pages of the KV cache, and which of them hold prompts that another request may share.

Full pages of finished prompts stay in a tree until their room is needed: a path from its root spells the
blocks of tokens (one page each) that a prompt begins with. The idea is that of SGLang's RadixAttention (Zheng
et al., 2023, arXiv:2312.07104), with blocks of one page instead of edges of any length. A page in the tree
is never written again, so that nothing is ever copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

GONE = -1
"""In a sequence's pages: one that it has let go of, because it is outside of its window."""
Key = tuple[int, ...]
"""What one page holds: its tokens, perhaps with more that tells it from pages of the same tokens."""


@dataclass(eq=False)
class _Node:
    page: int
    key: Key
    parent: _Node | None
    """None: what came before has been given away, so that only its users can still find it."""
    children: dict[Key, _Node] = field(default_factory=dict)
    users: int = 1


class Pages:
    """Pages 0 .. count-1: free, held by one sequence, or in the tree with any number of users.

    A user of a page in the tree uses all pages above it, too, and lets go of the deepest first. So the idle
    pages (in the tree, without a user), in the order in which they became idle, begin with a leaf: the one
    that was used least recently. Only users that look back no further than a window let go of pages above
    those they go on with. When such a page is given away, all that is below it leaves the tree.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.reached = 0
        """All pages from this one on have never been taken."""
        self._free = list(range(count - 1, -1, -1))
        self._root = _Node(-1, (), None)
        self._nodes: dict[int, _Node] = {}
        self._idle: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Pages that `take` could give."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages in the tree."""
        return len(self._nodes)

    def depth(self, keys: Sequence[Key]) -> int:
        """How many of the first `keys` are in the tree."""
        return len(self._path(keys))

    def share(self, keys: Sequence[Key]) -> list[int]:
        """The pages in the tree for the longest beginning of `keys`, for one more user."""
        path = self._path(keys)
        for node in path:
            node.users += 1
            self._idle.pop(node.page, None)
        return [node.page for node in path]

    def take(self, count: int) -> list[int] | None:
        """Pages to write to, at the cost of idle ones; None when there are not so many."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._forget(self._victim())
        taken = [self._free.pop() for _ in range(count)]
        self.reached = max(self.reached, 1 + max(taken, default=-1))
        return taken

    def keep(self, keys: Sequence[Key], pages: list[int]) -> None:
        """Puts the first pages of a sequence, which hold `keys`, into the tree.

        Where the tree has a page for a key already, that one takes the place in `pages`.
        """
        node = self._root
        for i, key in enumerate(keys):
            child = node.children.get(key)
            if pages[i] == GONE:
                if child is None:
                    break  # it has been given away, and what is below it could not be found
            elif child is None:
                child = self._nodes.setdefault(pages[i], _Node(pages[i], key, node))
                child.parent, node.children[key] = node, child
            elif child.page != pages[i]:
                self.release([pages[i]])
                pages[i] = child.page
                child.users += 1
                self._idle.pop(child.page, None)
            node = child

    def release(self, pages: Sequence[int], forget: bool = False) -> None:
        """One user less of a sequence's pages; GONE ones have none. `forget`: what they hold is not to
        be used again."""
        for page in reversed(pages):
            if page == GONE:
                continue
            node = self._nodes.get(page)
            if node is None:
                self._free.append(page)
                continue
            node.users -= 1
            if not node.users:
                self._idle[page] = None
                if node.parent is None or (forget and not node.children):
                    self._forget(node)

    def _path(self, keys: Sequence[Key]) -> list[_Node]:
        node, path = self._root, []
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _victim(self) -> _Node:
        """The idle page to give away: the oldest, or what is idle below it."""
        node = self._nodes[next(iter(self._idle))]
        while (
            below := next((child for child in node.children.values() if not child.users), None)
        ) is not None:
            node = below
        return node

    def _forget(self, node: _Node) -> None:
        """An idle page becomes a free one; so do those below it which are idle."""
        if node.parent is not None:
            del node.parent.children[node.key]
        below = [node]
        while below:
            node = below.pop()
            below += node.children.values()
            node.parent, node.children = None, {}
            if not node.users:
                del self._nodes[node.page], self._idle[node.page]
                self._free.append(node.page)


class Keys:
    """Of the pages of one sequence, in order.

    Pages with tokens of the answer have a key of this sequence's own: another request prefills these tokens,
    and the kernels of prefill and decode need not round alike. So no answer depends on what the cache happens
    to hold.
    """

    def __init__(self, prompt: int) -> None:
        """`prompt`: its tokens."""
        self._prompt, self._made = prompt, list[Key]()

    def of(self, tokens: Sequence[int], length: int, page_size: int, own: int) -> Sequence[Key]:
        """Of the pages that the first `length` tokens fill, which are the same ones each time. `own`: a
        number less than 0 that no other sequence has."""
        for end in range((len(self._made) + 1) * page_size, length + 1, page_size):
            block = tuple(tokens[end - page_size : end])
            self._made.append((own, *block) if end > self._prompt else block)
        return self._made[: length // page_size]
