"""Tests of the values of command-line options: sizes, counts and durations, each kind with a single
parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from mlcbuild.cli import VERBS, main, options, parser, verb_parser


def actions() -> Iterator[tuple[str, argparse.Action]]:
    """Yields every option of every command."""
    top = parser()
    (verbs,) = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    for name, sub in verbs.choices.items():
        for action in sub._actions:
            yield name, action


SIZES = [(verb, action) for verb, action in actions() if action.metavar in ("SIZE", "BYTES")]


def test_some_options_are_sizes() -> None:
    assert {(verb, action.option_strings[0]) for verb, action in SIZES} >= {
        ("worker", "--memory"),
        ("cache", "--max-size"),
    }


@pytest.mark.parametrize(
    ("verb", "action"), SIZES, ids=[f"{verb} {action.option_strings[0]}" for verb, action in SIZES]
)
def test_every_size_is_read_by_one_parser(verb: str, action: argparse.Action) -> None:
    assert callable(action.type)
    assert action.type("50GiB") == 50 * 2**30
    assert action.type("50GB") == action.type("50g") == 50 * 10**9
    assert action.type("1.5 MiB") == 3 * 2**19
    with pytest.raises(argparse.ArgumentTypeError, match=r"must be a size .*, found 'lots'"):
        action.type("lots")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["cache", "gc", "--max-size", "50 apples"],
            "8GB or 512MiB, found '50 apples'",
        ),
        (["run", "x.yaml", "--jobs", "0"], "must be a whole number of at least 1, found '0'"),
        (["bench", "serve", "http://x", "--warmup", "-1"], "--warmup"),
        (["bench", "serve", "http://x", "--timeout", "nan"], "must be a number of seconds, found 'nan'"),
    ],
)
def test_a_wrong_value_is_named(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_a_size_that_is_right_is_taken(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "gc", "--max-size", "50GiB", "--store", f"{tmp_path}/store"]) == 0
    assert capsys.readouterr().out == "removed 0 records and 0 files, 0 B\n"


def test_counts_and_durations() -> None:
    assert options.positive("3") == 3 and options.natural("0") == 0 and options.seconds("0.5") == 0.5
    for read, text in ((options.positive, "0"), (options.natural, "-1"), (options.seconds, "inf")):
        with pytest.raises(argparse.ArgumentTypeError, match="found"):
            read(text)


@pytest.mark.parametrize("verb", VERBS)
def test_the_parser_of_one_verb_has_the_help_of_the_whole_one(verb: str) -> None:
    (verbs,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    assert verb_parser(verb).format_help() == verbs.choices[verb].format_help()


@pytest.mark.parametrize(
    ("verb", "operands", "option"),
    [
        ("chat", ["nothing", "a question"], ["--temperature", "0"]),
        ("serve", ["nothing", "nowhere"], ["--port", "1"]),
        ("plan", ["nothing.yaml"], ["--no-remote"]),
        ("explain", ["nothing.yaml", "bundle/x"], ["--json"]),
        ("cache", ["push", "nothing.yaml", "file:///cache"], ["--json"]),
        ("bench", ["serve", "http://127.0.0.1:1"], ["--requests", "1"]),
    ],
)
def test_operands_may_follow_options(
    verb: str, operands: list[str], option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that operands may stand before or after options: the command fails in the same way in both
    cases, because the files that it names do not exist."""
    code = main([verb, *operands, *option])
    expected = capsys.readouterr()
    assert code and expected.err and "too many" not in expected.err
    for place in range(len(operands)):
        assert main([verb, *operands[:place], *option, *operands[place:]]) == code
        assert capsys.readouterr() == expected
