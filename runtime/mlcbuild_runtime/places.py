"""Where in a regular expression a text has come to. Where two texts have come to the same place, they go on
in the same ways, so that what is known of these has to be found out once.

A place is a set of the expression's letters: those that a text's last one may be, after Glushkov (The
abstract theory of automata, 1961). No two letters are ever taken for one. So it does not matter here which
letters a class has besides those of ASCII: a text with one of these is at no known place. Neither is any text
of an expression that has more than the usual operators, or too many letters.

What tokens may follow depends on no more letters than the longest token has. Places that are alike as far as
that are of one kind: most of those in `[a-z ]{1,400}`, say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mlcbuild_runtime.expressions import Either, Letter, Part, Repeat, UnknownError, read, unknown

LETTERS = 2048
"""Of an expression, at most, each as often as it is counted: a place has a bit for each."""
PLACES, MASKS = 4096, 256
"""That are kept of an expression. With a vocabulary of 49,152 tokens, so many masks take 1.5 MB."""
_PARTS, _PAIRS, _WORK = 4 * LETTERS, 1 << 15, 1 << 17
"""Of an expression, each as often as it is counted: its parts; letters that follow others; and how many of
these are looked at to see which are alike."""


class Place:
    """Of a text in an expression, and what its reader knows of it."""

    __slots__ = ("_ahead", "_letters", "_next", "_of", "kind")

    def __init__(self, of: Places, letters: int, kind: Hashable) -> None:
        self._of, self._letters, self.kind = of, letters, kind
        self._next: dict[int, Place | None] = {}
        self._ahead: int | None = None

    @property
    def mask(self) -> NDArray[np.int32] | None:
        """Of tokens that may come next."""
        masks = self._of.masks
        found = masks.get(self.kind)
        return masks.get(self) if found is None else found

    def keep(self, mask: NDArray[np.int32], free: bool) -> None:
        """The mask; free: texts go on in several ways."""
        if len(self._of.masks) >= MASKS:
            self._of.masks.clear()
        # How a text is spelled that must come may depend on more of it than a token has.
        self._of.masks[self.kind if free else self] = mask

    @property
    def ahead(self) -> int | None:
        """Bytes that must come next."""
        return 0 if self.kind in self._of.masks else self._ahead

    @ahead.setter
    def ahead(self, count: int) -> None:
        self._ahead = count

    @property
    def finished(self) -> bool | None:
        """Nothing may come next."""
        return self._of.finished.get(self.kind)

    @finished.setter
    def finished(self, finished: bool) -> None:
        self._of.finished[self.kind] = finished

    def after(self, text: bytes) -> Place | None:
        """The place of the text that goes on with this one, if it is known."""
        place = self
        for byte in text:
            try:
                following = place._next[byte]
            except KeyError:
                following = place._next[byte] = self._of.step(place._letters, byte)
            if following is None:
                return None
            place = following
        return place


class Places:
    """Of one expression. May be used from one thread at a time."""

    def __init__(self, follows: Sequence[int], fits: Sequence[int], kinds: Sequence[int]) -> None:
        """Of each letter: which may follow it, where 0 stands for the start; what it may be; and the kind of
        what follows it."""
        self._follows, self._kinds = follows, kinds
        self.masks: dict[Hashable, NDArray[np.int32]] = {}
        """Of kinds of places, where texts go on in several ways, and of other places."""
        self.finished: dict[Hashable, bool] = {}
        self._accept = [sum(1 << at for at, fit in enumerate(fits) if fit >> byte & 1) for byte in range(128)]
        self._known: dict[int, Place] = {}
        self.start = self._place(1)

    def step(self, letters: int, byte: int) -> Place | None:
        """Where one more byte leads."""
        found = 0
        if byte < len(self._accept):
            while letters:
                lowest = letters & -letters
                found |= self._follows[lowest.bit_length() - 1]
                letters ^= lowest
            found &= self._accept[byte]
        return self._place(found) if found else None

    def _place(self, letters: int) -> Place:
        place = self._known.get(letters)
        if place is None:
            if len(self._known) >= PLACES:
                for known in self._known.values():
                    known._next.clear()
                self._known = {}
                self.finished.clear()
            kind = frozenset(self._kinds[at] for at in _bits(letters))
            place = self._known[letters] = Place(self, letters, kind)
        return place


def places(source: str, longest: int, space: bool = False) -> Places | None:
    """Of a regular expression in Rust's syntax, which is taken to be a valid one. None: they are not known.
    longest: letters of a token, at most.
    space: a text may begin with a space that is no part of what the expression describes."""
    made = _Letters()
    try:
        ends = made.add(read(source))
    except UnknownError:
        return None
    made.follows[0] = ends.first
    if space:
        blank = 1 << ord(" ")
        if any(made.fits[at] & blank for at in _bits(ends.first)):  # it could be either
            return None
        made.follows[0] |= 1 << len(made.fits)
        made.fits.append(blank)
        made.names.append(" ")
        made.follows.append(ends.first)
    last = ends.last
    if ends.empty:
        last |= 1 | (1 << len(made.fits) - 1 if space else 0)
    return Places(made.follows, made.fits, _kinds(made, last, longest))


@dataclass(frozen=True)
class _Ends:
    """Of a part of an expression."""

    empty: bool
    """It may be."""
    first: int
    """Letters that a text of it may begin with, as bits."""
    last: int


class _Letters:
    """Of an expression, numbered from 1 on."""

    def __init__(self) -> None:
        self.follows, self.fits, self.names = [0], [0], [""]
        self._parts = self._pairs = 0

    def add(self, part: Part) -> _Ends:
        self._parts += 1
        if self._parts > _PARTS:
            unknown()
        if isinstance(part, Letter):
            return self._letter(part)
        if isinstance(part, Either):
            return _either([self.add(each) for each in part.parts])
        if isinstance(part, Repeat):
            return self._repeated(part)
        found = _Ends(True, 0, 0)
        for each in part.parts:
            found = self._chained(found, self.add(each))
        return found

    def _letter(self, letter: Letter) -> _Ends:
        if len(self.fits) > LETTERS:
            unknown()
        at = 1 << len(self.fits)
        self.fits.append(letter.fits)
        self.names.append(letter.name)
        self.follows.append(0)
        return _Ends(False, at, at)

    def _chained(self, one: _Ends, other: _Ends) -> _Ends:
        self._join(one.last, other.first)
        first = one.first | other.first if one.empty else one.first
        last = one.last | other.last if other.empty else other.last
        return _Ends(one.empty and other.empty, first, last)

    def _join(self, lasts: int, firsts: int) -> None:
        self._pairs += lasts.bit_count() * firsts.bit_count()
        if self._pairs > _PAIRS:
            unknown()
        for at in _bits(lasts):
            self.follows[at] |= firsts

    def _repeated(self, repeat: Repeat) -> _Ends:
        part, least, most = repeat.part, repeat.least, repeat.most
        if max(least, most or 0) > LETTERS:
            unknown()
        found = _Ends(True, 0, 0)
        if most is None:
            found = self.add(part)
            self._join(found.last, found.first)
            found, least = replace(found, empty=found.empty or not least), max(0, least - 1)
        # Those that may be missing hang on one another: a place tells how many there were.
        for _ in range((most or least) - least):
            found = replace(self._chained(self.add(part), found), empty=True)
        for _ in range(least):
            found = self._chained(self.add(part), found)
        return found


def _either(found: list[_Ends]) -> _Ends:
    first = last = 0
    for ends in found:
        first, last = first | ends.first, last | ends.last
    return _Ends(any(ends.empty for ends in found), first, last)


def _bits(number: int) -> list[int]:
    found = []
    while number:
        lowest = number & -number
        found.append(lowest.bit_length() - 1)
        number ^= lowest
    return found


def _kinds(letters: _Letters, last: int, depth: int) -> list[int]:
    """A number for each letter: those with the same one are followed alike, as far as `depth` letters go. By
    splitting sets of letters, once for each of these; where that takes long, no two are taken to be alike."""
    after = [_bits(following) for following in letters.follows]
    before: list[list[int]] = [[] for _ in after]
    for at, following in enumerate(after):
        for other in following:
            before[other].append(at)
    kinds, sizes, touched = [0] * len(after), [len(after)], set(range(len(after)))
    work = 0
    for _ in range(depth):
        work += sum(len(after[at]) for at in touched)
        if work > _WORK:
            return list(range(len(after)))
        split: defaultdict[int, defaultdict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
        for at in touched:
            look = last >> at & 1, frozenset((letters.names[other], kinds[other]) for other in after[at])
            split[kinds[at]][look].append(at)
        moved: list[int] = []
        for kind, looks in split.items():
            groups = sorted(looks.values(), key=len)
            if sum(map(len, groups)) == sizes[kind]:  # one of them stays what it was
                groups.pop()
            for group in groups:
                for at in group:
                    kinds[at] = len(sizes)
                sizes[kind] -= len(group)
                sizes.append(len(group))
                moved += group
        touched = {other for at in moved for other in before[at]}
        if not touched:
            break
    return kinds
