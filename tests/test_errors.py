"""Tests of errors of the builder: exit codes, the order of problems, and what messages may hold."""

from __future__ import annotations

import pickle

import pytest

from mlcbuild import errors
from mlcbuild.errors import InputError, Problem, Problems


def test_the_tree_in_the_module_s_docstring_is_that_of_its_classes() -> None:
    """Checks the tree of exception classes in the docstring of mlcbuild.errors against the classes. A line of
    it has a class and its exit code; the line's depth in the tree determines the base class."""
    bases: list[type[Exception]] = [Exception]
    listed = set()
    for line in (errors.__doc__ or "").splitlines():
        name, _, rest = line.lstrip(" │├└─").partition(" ")
        if "exit code" not in rest:
            continue
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 4
        kind = getattr(errors, name)
        assert kind.__base__ is bases[depth - 1], name
        assert kind.exit_code == int(rest.split("exit code", 1)[1].split()[0]), name
        bases[depth:] = [kind]
        listed.add(name)
    public = {name for name in vars(errors) if name.endswith("Error")}
    assert public == listed


def test_problems_are_sorted_once_each_and_survive_a_process() -> None:
    listed = [
        Problem("b", 2, 9, "x"),
        Problem("b", 10, 1, "y"),
        Problem("b", 2, 9, "x"),
        Problem("a", 0, 0, "z"),
    ]
    error = InputError(listed)
    assert str(error) == "a: z\nb:2:9: x\nb:10:1: y"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.problems) == (InputError, error.problems)


@pytest.mark.parametrize("method", ["append", "extend", "__iadd__", "__init__"])
def test_a_file_with_too_many_problems_ends_the_search(method: str) -> None:
    listed = [Problem("a", i + 1, 1, "x") for i in range(errors.MOST_PROBLEMS)]
    problems, last = Problems(listed), Problem("a", 5000, 1, "x")
    with pytest.raises(InputError, match=r"^a: it has more than 1000 problems; correct these") as caught:
        if method == "__init__":
            Problems([*listed, last])
        else:
            getattr(problems, method)(last if method == "append" else [last])
    assert len(caught.value.problems) == errors.MOST_PROBLEMS + 1


@pytest.mark.parametrize(
    ("word", "valid", "end"),
    [
        ("qwen2", ["qwen3", "llama", "qwen2_moe"], "did you mean 'qwen3'?"),
        ("mdoel", ["model", "modal"], "did you mean 'model'?"),
        ("zzz", ["b", "a"], "known: a, b"),
        ("x", [], "none is defined"),
        ("zzz", [f"n{i:03}" for i in range(40)], " and 10 more"),
        ("x" * 5000, ["x" * 4999], f"known: {'x' * 100}..."),
    ],
)
def test_unknown_names_have_a_suggestion_or_the_list(word: str, valid: list[str], end: str) -> None:
    assert errors.did_you_mean(word, valid).endswith(end)


def test_of_many_names_those_with_the_same_first_letter_are_compared() -> None:
    many = [f"a{i:04}" for i in range(600)] + ["badger"]
    assert errors.closest_name("badgre", many) == "badger"
    assert errors.closest_name("zadger", many) is None


def test_messages_are_short_and_visible() -> None:
    assert errors.shortened("a" * 2000) == "a" * 2000
    long = errors.shortened("start" + "x" * 5000 + "end")
    assert len(long) <= errors.LONGEST_MESSAGE and long.startswith("start") and long.endswith("end")
    assert errors.one_line("a\n\x1b[31mé\u202e") == "a\\n\\x1b[31mé\\u202e"
    assert errors.safe_lines("a\tb\n\x07c") == "a       b\n\\x07c"
    assert str(errors.CheckpointError("short\n" + "y" * 9000)).startswith("short\nyyy")
    assert len(str(errors.CheckpointError("y" * 9000))) <= errors.LONGEST_MESSAGE
