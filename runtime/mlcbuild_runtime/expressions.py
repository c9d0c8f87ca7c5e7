"""Regular expressions in the syntax of Rust, as far as their operators are the usual ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

_DEEPEST = 50
"""Groups within groups."""
_ASCII = (1 << 128) - 1


class UnknownError(Exception):
    """The expression has something that is not known here."""


def unknown() -> NoReturn:
    raise UnknownError


@dataclass(frozen=True)
class Letter:
    fits: int
    """Bits of letters of ASCII."""
    name: str
    """As the expression has it."""


@dataclass(frozen=True)
class Chain:
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Either:
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Repeat:
    part: Part
    least: int
    most: int | None


Part = Letter | Chain | Either | Repeat


def _set(letters: str) -> int:
    return sum(1 << ord(letter) for letter in letters)


def _range(first: str, last: str) -> int:
    return sum(1 << at for at in range(ord(first), min(ord(last), 127) + 1))


_DIGITS, _BLANKS = _range("0", "9"), _set("\t\n\v\f\r ")
_WORD = _DIGITS | _range("a", "z") | _range("A", "Z") | _set("_")
_CLASSES = {"d": _DIGITS, "s": _BLANKS, "w": _WORD} | {
    name: _ASCII ^ letters for name, letters in {"D": _DIGITS, "S": _BLANKS, "W": _WORD}.items()
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;=?@[\\]^_`{|}~")
"""That a backslash makes a letter like others: < and > would be bounds of words."""
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def read(source: str) -> Part:
    """An expression, which is taken to be a valid one. Raises UnknownError."""
    return _Reader(source).whole()


class _Reader:
    """Reads an expression."""

    def __init__(self, source: str) -> None:
        self._source, self._at, self._depth = source, 0, 0

    def whole(self) -> Part:
        found = self._either()
        return found if self._at == len(self._source) else unknown()

    def _next(self) -> str:
        return self._source[self._at : self._at + 1]

    def _take(self) -> str:
        letter = self._next()
        self._at += 1
        return letter or unknown()

    def _took(self, letters: str) -> bool:
        """Where these come next they are taken."""
        if not self._source.startswith(letters, self._at):
            return False
        self._at += len(letters)
        return True

    def _either(self) -> Part:
        parts = [self._chain()]
        while self._took("|"):
            parts.append(self._chain())
        return Either(tuple(parts))

    def _chain(self) -> Part:
        parts: list[Part] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._counted(self._one()))
        return Chain(tuple(parts))

    def _one(self) -> Part:
        begun, letter = self._at, self._take()
        if letter == "(":
            return self._group()
        if letter == "[":
            fits = self._class()
        elif letter == ".":
            fits = _ASCII ^ _set("\n")
        elif letter == "\\":
            fits, _ = self._escaped()
        else:
            fits = _range(letter, letter) if letter not in "^${}]*+?" else unknown()
        return Letter(fits, self._source[begun : self._at])

    def _group(self) -> Part:
        self._depth += 1
        if self._depth > _DEEPEST or (not self._took("?:") and self._next() == "?"):
            unknown()
        found = self._either()
        self._depth -= 1
        return found if self._took(")") else unknown()

    def _escaped(self) -> tuple[int, str]:
        """Letters after a backslash; and if it is one, which."""
        letter = self._take()
        if letter in _CLASSES:
            return _CLASSES[letter], ""
        if letter not in _PUNCTUATION and letter not in _CONTROLS:
            unknown()
        one = _CONTROLS.get(letter, letter)
        return _set(one), one

    def _class(self) -> int:
        negated, found, begun = self._took("^"), 0, self._at
        while self._at == begun or not self._took("]"):
            if self._next() in ("[", "]") or any(self._took(mark) for mark in ("&&", "--", "~~")):
                unknown()  # classes in classes
            letters, first = self._item()
            if first and self._next() == "-" and self._source[self._at + 1 : self._at + 2] not in "]-":
                self._take()
                _, last = self._item()
                letters = _range(first, last or unknown())
            found |= letters
        return _ASCII ^ found if negated else found

    def _item(self) -> tuple[int, str]:
        letter = self._take()
        return self._escaped() if letter == "\\" else (_range(letter, letter), letter)

    def _counted(self, part: Part) -> Part:
        mark = self._next()
        if mark in _COUNTS:
            self._take()
            least, most = _COUNTS[mark]
        elif self._took("{"):
            counts, closed, _ = self._source[self._at :].partition("}")
            self._at += len(counts) + len(closed)
            low, comma, high = counts.partition(",")
            if not closed or not low.isdecimal() or not (high.isdecimal() or not high):
                unknown()
            least, most = int(low), int(high) if high else None if comma else int(low)
        else:
            return part
        return Repeat(part, least, most) if self._next() not in ("*", "+", "?", "{") else unknown()
