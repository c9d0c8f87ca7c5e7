"""Places in regular expressions: what may follow is the same at the same place, however a text got there."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlcbuild_runtime import places as module
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.grammar import Compiled, Constraint, Grammars, Matcher
from mlcbuild_runtime.places import Places, places
from mlcbuild_runtime.step import Mask

from .test_grammar import GRAMMARS, SIZE, TOKENIZERS, allowed_by

TOKENIZER = TOKENIZERS["json"]

ITEMS = st.sampled_from(
    [
        *"abc01 ,.",
        r"\d",
        r"\w",
        r"\s",
        r"\.",
        r"\-",
        r"\n",
        "[a-c]",
        "[^a,]",
        "[-ab]",
        r"[\d.-]",
        ".",
        "the",
        " and the end",
        "[a-c ]{3,40}",
        "[^x]{25,}",
        "é",
    ]
)


def _repeated(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"])
    return st.builds(lambda part, count: f"({part}){count}", parts, counts)


def _joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    some = st.lists(parts, min_size=1, max_size=4)
    return some.map("".join) | some.map(lambda found: f"(?:{'|'.join(found)})")


EXPRESSIONS = st.recursive(ITEMS, lambda parts: _repeated(parts) | _joined(parts), max_leaves=8)


def compiled(grammars: Grammars, pattern: str, message: bool = False) -> Compiled:
    return grammars.compiled(Constraint("regex", pattern, "x"), message)


def unplaced(found: Compiled) -> Matcher:
    """A matcher that has to ask llguidance about everything."""
    return Matcher(found._matcher.deep_copy(), found._ends)


@settings(deadline=None)
@given(EXPRESSIONS, st.integers(0, 1 << 30), st.sampled_from(["json", "pieces"]), st.booleans())
def test_masks_at_known_places_are_those_that_llguidance_gives(
    pattern: str, seed: int, name: str, message: bool
) -> None:
    found, source = compiled(GRAMMARS[name], pattern, message), random.Random(seed)
    for _ in range(3):  # the first one is the first at all its places
        try:
            walk((found.matcher(), unplaced(found)), TOKENIZERS[name].eos, source)
        except RequestError as error:  # llguidance counts what all answers together have made
            assert "too many expressions" in str(error)
            return


def walk(both: tuple[Matcher, Matcher], ends: frozenset[int], source: random.Random) -> None:
    one, other = both
    for _ in range(25):
        assert one.finished == other.finished
        if one.finished:
            return
        assert one.free == other.free and one.forces == other.forces
        allowed = allowed_by(other)
        assert np.array_equal(allowed_by(one), allowed)
        assert np.array_equal(one.mask(), other.mask())
        forced = other.forced(8)
        assert one.forced(8) == forced
        tokens = allowed.nonzero()[0].tolist()
        ending, others = [t for t in tokens if t in ends], [t for t in tokens if t not in ends]
        token = source.choice(ending if ending and source.random() < 0.1 else others or ending)
        if one.free and token not in ends:
            wrong = source.randrange(SIZE)
            assert one.accepted([wrong]) == other.accepted([wrong])
            assert bool(allowed[wrong]) or not one.tries(wrong)
            assert not source.randrange(2) or one.tries(token)
        one.take(token)
        other.take(token)


@settings(deadline=None)
@given(st.data(), EXPRESSIONS)
def test_every_beginning_of_a_text_that_fits_has_a_place(data: st.DataObject, pattern: str) -> None:
    text = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    found = known(pattern)
    assert found is not None
    if text.isascii():
        assert found.start.after(text.encode()) is not None


def known(pattern: str, space: bool = False, longest: int = 8) -> Places | None:
    return places(pattern, longest, space)


def reached(found: Places | None, text: str) -> module.Place | None:
    assert found is not None
    return found.start.after(text.encode())


@pytest.mark.parametrize(
    ("pattern", "text", "same"),
    [
        ("(ab|cd)*", "ab", "cdabcdab"),
        ("[a-z]{2,9} [0-9]+", "word 1", "other 4711"),
        (r"(\w+: \d{1,3}; )*", "a: 1; ", "name: 234; b: 5; "),
        ("x{3,}", "xxxx", "xxxxxxx"),
    ],
)
def test_texts_that_come_to_one_place(pattern: str, text: str, same: str) -> None:
    found = known(pattern)
    assert reached(found, text) is reached(found, same) is not None


@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [
        ("x{3,9}", "xxx", "xxxx"),
        ("(ab|cb)*", "ab", "cb"),  # they go on alike, but nobody knows
        (r"a\dx|b[0-9]x", "a1", "b1"),  # nor do they: after a, digits of other scripts fit, too
        ("(a|b){1,4}", "ab", "aba"),
    ],
)
def test_texts_that_come_to_two(pattern: str, text: str, other: str) -> None:
    found = known(pattern)
    assert reached(found, text) is not None and reached(found, other) is not None
    assert reached(found, text) is not reached(found, other)


@pytest.mark.parametrize(
    ("pattern", "text", "other", "alike"),
    [
        ("[a-z ]{1,400}", "abc", 100 * "abc", True),
        ("[a-z ]{1,400}", "abc", 132 * "abc", False),  # its end is nearer than a token is long
        ("x{1000,}", "x", 900 * "x", True),
        ("(ab|cb)*", "ab", "cb", True),
        (r"a\dx|b[0-9]x", "a", "b", False),  # digits of other scripts
        (r"a\dx|b[0-9]x", "a1", "b1", True),
        ("ab?|cb", "a", "c", False),  # one may be the end
        ("ab{7}x|cb{7}y", "a", "c", False),
        ("ab{8}x|cb{8}y", "a", "c", True),  # no token is that long
        ("ab{8}x|cb{8}y", "ab", "cb", False),
        ("(a|b)(c|d)|e(c|d|f)", "a", "e", False),
    ],
)
def test_places_of_one_kind(pattern: str, text: str, other: str, alike: bool) -> None:
    found = known(pattern)
    one, two = reached(found, text), reached(found, other)
    assert one is not None and two is not None
    assert one is not two and (one.kind == two.kind) is alike


def test_kinds_that_take_long_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORK", 10)
    found = known("[a-z ]{1,40}")
    one, two = reached(found, "abc"), reached(found, "abcd")
    assert one is not None and two is not None and one.kind != two.kind


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("abc", "abd"),
        ("a{2,3}", "aaaa"),
        ("[^a-c]", "b"),
        ("[^a-c]", "é"),  # it fits, at a place that is not known
        (".", "\n"),
        (r"\S\D\W", "a11"),
        ("a{0}b", "a"),
        ("", "a"),
    ],
)
def test_texts_without_a_place(pattern: str, text: str) -> None:
    assert reached(known(pattern), text) is None


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "^a",
            "a$",
            r"\bword\b",
            r"\<word\>",
            r"\p{L}",
            r"\x41",
            r"\u0041",
            "(?i)a",
            "(?P<name>a)",
            "(?x: a )",
        ),
        *("a*?", "a+?", "a??", "a{2}?", "a**", "a{,3}", "a{x}", "a{2"),
        *(
            "[[:alpha:]]",
            "[a[b]]",
            "[a&&b]",
            "[a--b]",
            "[a-d--b]",
            "[a~~b]",
            "[]a]",
            r"[a-\d]",
            "[a",
            "[",
            "a]",
            "a}",
        ),
        *("(a", "a)", "(?", "\\", r"\q"),
        *(
            "a{2049}",
            "(a{50}){50}",
            "(a?){600}",
            "((((a?){9}){9}){9}){9}",
            "(((){500}){500}){500}",
            "(" * 60 + "a" + ")" * 60,
        ),
    ],
)
def test_expressions_that_are_not_known(pattern: str) -> None:
    assert known(pattern) is None


def test_a_space_before_the_text() -> None:
    found = known("[a-z]+ x", space=True)
    assert reached(found, "abc") is reached(found, " abc")
    assert reached(found, "  abc") is None
    assert reached(known("[a-z]+ x"), " abc") is None
    assert known(" ?a", space=True) is None, "nobody can tell whose space it is"
    assert known(r"\s*a", space=True) is None


def test_not_all_places_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLACES", 4)
    found = known("(a|b){1,9}")
    assert found is not None
    first = found.start.after(b"aba")
    assert first is not None and len(found._known) <= 4
    kept = found.start.after(b"aba")
    assert kept is not None and kept._letters == first._letters
    monkeypatch.setattr(module, "MASKS", 2)
    for place, free in ((first, True), (kept, False), (found.start, True)):
        place.keep(np.zeros(1, np.int32), free)
    assert first.mask is None and found.start.mask is not None


def test_a_mask_is_made_once_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """And llguidance hears of the tokens when it is asked the next time."""
    made, bits = list[Matcher](), Matcher._bits

    def counted(self: Matcher) -> Mask:
        made.append(self)
        return bits(self)

    monkeypatch.setattr(Matcher, "_bits", counted)
    grammars = Grammars(TOKENIZER.vocabulary, SIZE, TOKENIZER.eos)
    found = compiled(grammars, "([a-z]{2,9} [0-9]{1,4}(, |; ))+")
    tokens = TOKENIZER.vocabulary.encode("ab 12, cde 345; ", special=False)
    for again in (False, True):
        made.clear()
        matcher = found.matcher()
        for token in tokens:
            assert matcher.mask()[token >> 5] >> (token & 31) & 1
            matcher.take(token)
        assert bool(made) != again
    after = matcher.after(TOKENIZER.vocabulary.encode("xy", special=False))
    fresh = unplaced(found)
    for token in [*tokens, *TOKENIZER.vocabulary.encode("xy", special=False)]:
        fresh.take(token)
    assert np.array_equal(allowed_by(after), allowed_by(fresh))
    assert matcher.accepted(tokens) == len(tokens)


def test_what_was_masked_once_is_not_tried_again() -> None:
    """Whatever other answers have wanted: the same seed gives the same answer."""
    found = compiled(GRAMMARS["json"], "[a-z]{1,400}")
    tokens = TOKENIZER.vocabulary.encode("some text", special=False)[:1]
    for _ in range(2):
        matcher = found.matcher()
        matcher.take(tokens[0])
        assert not matcher.ready
        matcher.mask()
        matcher.take(tokens[0])
        assert matcher.ready and matcher.after(tokens).ready
    assert not unplaced(found).ready
