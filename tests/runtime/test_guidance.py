"""Tests of llguidance as this server uses it: the vocabulary, limits of time, and errors in plain words."""

from __future__ import annotations

import numpy as np
import pytest
from mlcbuild_runtime.constraints import guidance
from mlcbuild_runtime.constraints.guidance import MaskTime, Tokens

TEXTS = (b"a", b"ab", b"abc", b"b", b"c", b" ", b"\xc3", b"\xa9", b"<think>", b"</s>")
VOCABULARY = Tokens(TEXTS, special={8, 9}, ends={9})


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abcab", [2, 1]),
        ("abb", [1, 3]),
        ("é", [6, 7]),
        ("", []),
        ("ab!c", [1]),
        ("<think>", []),
    ],
)
def test_a_text_is_cut_into_the_longest_tokens(text: str, tokens: list[int]) -> None:
    """Checks that a text is divided into the longest tokens that match. A special token's name stays out,
    because such a token is never part of a text; what follows a byte without a token is left to
    llguidance."""
    assert VOCABULARY(text) == tokens


def test_which_tokens_are_ordinary_and_plain() -> None:
    assert VOCABULARY.ordinary.tolist() == [True] * 8 + [False] * 2
    assert VOCABULARY.plain.nonzero()[0].tolist() == [0, 1, 2, 3, 4]
    assert (VOCABULARY.longest, VOCABULARY.eos_token_id, VOCABULARY.bos_token_id) == (3, 9, None)


def allowed(grammar: str) -> tuple[list[int], str]:
    """Returns (the tokens that may come first under a grammar, the error message if the grammar is refused,
    else ""). grammar: in Lark syntax, for the small vocabulary of these tests."""
    matcher = guidance.matcher(VOCABULARY.tokenizer(), grammar)
    error = guidance.beginning(matcher)
    bits = np.frombuffer(b"" if error else matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little")[: len(TEXTS)].nonzero()[0].tolist(), error


def test_masks_are_those_of_the_grammar() -> None:
    assert allowed('start: "ab"') == ([1], ""), "forced text is cut as the tokenizer would"
    assert allowed("start: /(ab)*/") == ([0, 1, 9], "")
    assert allowed("start: <[8]>") == ([8], "")
    assert allowed('start: "é"') == ([6], "")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "é" nowhere', "nowhere"),
        ("start: <no_such>", 'no special token is called "<no_such>": write one by its number'),
        (
            'start: a\na: "x" a',
            "it is too complex, since it repeats or branches too often",
        ),
        ("start: start", "no text fits it"),
    ],
)
def test_errors_are_one_plain_line(grammar: str, words: str) -> None:
    _, error = allowed(grammar)
    shown = guidance.reason(error)
    assert error and words in shown and "\n" not in shown and len(shown) < 700


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("", "unknown reason"),
        ("panic: index out of range", "llguidance cannot read it: panic: index out of range"),
        ("at 3(4): bad\n  | x\nerror: no\nmore", "bad error: no"),
        ("error: no", "error: no"),
        ("y" * 999, "y" * 297 + "..."),
        ("NoExtensionBias", "no text fits it"),
    ],
)
def test_messages_of_llguidance(message: str, shown: str) -> None:
    assert guidance.reason(message).startswith(shown)


def test_the_slowest_mask_of_an_answer_does_not_count() -> None:
    time = MaskTime()
    assert time.add(9.0, 1) == "" and time.add(0.2, 2) == ""
    worse = MaskTime()
    worse.add(0.1, 1)
    assert worse.add(9.0, 2) == ""
    assert worse.add(0.3, 3).startswith("it took 0.30 s to see which tokens may come next")


def test_masks_may_take_so_much_a_token_on_average() -> None:
    time = MaskTime()
    each = guidance.TOKEN_SECONDS * 2
    refusals = [tokens for tokens in range(1, 40) if time.add(each, tokens)]
    # After n tokens n - 1 masks count: 0.04 (n - 1) > 0.25 + 0.02 n from n = 15 on.
    assert refusals[0] == 15
