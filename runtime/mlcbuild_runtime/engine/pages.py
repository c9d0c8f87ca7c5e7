"""Allocates the pages of the KV cache, and shares those that hold the same beginning of a prompt.

Full pages of a prompt enter a prefix tree as soon as they are computed, and stay there until their memory is
needed: a path from the root spells the blocks of tokens, one page each, with which a prompt begins. The idea
is that of SGLang's RadixAttention (Zheng et al., 2023, arXiv:2312.07104), with blocks of one page instead of
edges of any length. A page in the tree is never written again, so nothing is ever copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

GONE = -1
"""Entry in a sequence's list of page numbers for a page that was released, because it is outside of the
attention window."""
Key = tuple[int, ...]
"""The key that identifies the content of one KV cache page, as a tuple of numbers: the page's tokens. For
tokens of an answer a negative number of their sequence comes first, so that no other sequence shares the
page."""


@dataclass(eq=False)
class _Node:
    page: int
    key: Key
    parent: _Node | None
    """The node of the prefix tree for the page before this one in a prompt, the root for the first page; None
    once that page was reassigned, so that no new request can reach this node."""
    children: dict[Key, _Node] = field(default_factory=dict)
    users: int = 1


class Pages:
    """The KV cache pages 0 .. count-1: each is free, owned by one sequence, or in the prefix tree with any
    number of users.

    A user of a page in the tree also uses all pages above it, and releases the deepest first. So the idle
    pages (in the tree, without a user), ordered by when they became idle, begin with a leaf: the least
    recently used one. Only sequences with an attention window release pages above those they continue to use.
    When such a page is reassigned, everything below it leaves the tree.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.reached = 0
        """Number of the first KV cache page that, like all pages after it, has never been allocated."""
        self._free = list(range(count - 1, -1, -1))
        self._root = _Node(-1, (), None)
        self._nodes: dict[int, _Node] = {}
        self._idle: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Returns the number of KV cache pages that can be allocated: free ones, and idle ones of the prefix
        tree."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Returns the number of KV cache pages in the prefix tree."""
        return len(self._nodes)

    def depth(self, keys: Sequence[Key]) -> int:
        """Returns how many of a prompt's KV cache pages, from the first one on, are in the prefix tree, so
        that they need not be computed. keys: for each full page of the prompt, in order, a tuple that
        identifies its content, mainly its tokens."""
        return len(self._path(keys))

    def share(self, keys: Sequence[Key]) -> list[int]:
        """Returns the numbers of the KV cache pages in the prefix tree that hold the longest prefix of
        `keys`, and counts one more user of each until `release` is called; [] if the tree lacks the first
        one. keys: for each full page of a sequence, in order, a tuple that identifies its content, mainly its
        tokens."""
        path = self._path(keys)
        for node in path:
            node.users += 1
            self._idle.pop(node.page, None)
        return [node.page for node in path]

    def take(self, count: int) -> list[int] | None:
        """Allocates `count` KV cache pages, evicting idle ones from the prefix tree if necessary, and returns
        their numbers; None, with nothing evicted, if there are too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._forget(self._victim())
        allocated = [self._free.pop() for _ in range(count)]
        self.reached = max(self.reached, 1 + max(allocated, default=-1))
        return allocated

    def keep(self, keys: Sequence[Key], pages: list[int]) -> None:
        """Puts the first KV cache pages of a sequence, which the caller has filled, into the prefix tree; the
        sequence uses them there until `release` is called. keys: for each of these pages, in order, a tuple
        that identifies its content, mainly its tokens; pages: numbers of the sequence's pages.

        Where the tree already has another page for a key, that page replaces the sequence's own one in the
        list `pages`, and the own one is released. Keys from a page on that was released before (GONE) and has
        left the tree are ignored.
        """
        node = self._root
        for i, key in enumerate(keys):
            child = node.children.get(key)
            if pages[i] == GONE:
                if child is None:
                    break  # the page was reassigned, so nothing below it can be reached
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
        """Ends one sequence's use of KV cache pages. pages: their numbers; GONE stands for a page that was
        released before. Pages outside the prefix tree become free; pages in it that no sequence uses any more
        stay there until their memory is needed. forget: True if these, too, leave the tree and become free,
        unless other pages continue them there."""
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
        """Returns the node of the prefix tree whose KV cache page is to be evicted next, and changes nothing.
        At least one page must be idle. It starts at the page that has been idle longest, and returns the
        deepest page that it reaches by moving from a page to an idle one which continues the same prompt."""
        node = self._nodes[next(iter(self._idle))]
        while (
            below := next((child for child in node.children.values() if not child.users), None)
        ) is not None:
            node = below
        return node

    def _forget(self, node: _Node) -> None:
        """Removes an idle page from the prefix tree, with all pages that continue the same prompt after it,
        and frees the idle ones of these. Pages that a sequence uses become free when the last one releases
        them."""
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


class PageKeys:
    """Computes the keys that identify the contents of a sequence's KV cache pages, in order.

    Pages with tokens of the answer get a key that only this sequence has: another request would prefill these
    tokens, and the kernels of prefill and decode may round differently. So no answer depends on the contents
    of the cache.
    """

    def __init__(self, prompt: int) -> None:
        """Prepares the keys that identify the contents of a sequence's KV cache pages; none is computed yet.
        prompt: number of tokens of the prompt."""
        self._prompt, self._made = prompt, list[Key]()

    def of(self, tokens: Sequence[int], length: int, page_size: int, answer_key: int) -> Sequence[Key]:
        """Returns the keys (tuples of integers), one for each full KV cache page of the first `length` tokens
        of a sequence, in order, that identify the pages' contents. Keys returned earlier never change.
        tokens: all tokens of the sequence; answer_key: a negative number that no other sequence has, with
        which the keys of pages with tokens of the answer begin."""
        for end in range((len(self._made) + 1) * page_size, length + 1, page_size):
            block = tuple(tokens[end - page_size : end])
            self._made.append((answer_key, *block) if end > self._prompt else block)
        return self._made[: length // page_size]
