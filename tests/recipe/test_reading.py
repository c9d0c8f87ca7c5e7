"""Tests of recipes, locks, configs and prompts that are not regular files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.recipe.settings import LARGEST_PROMPTS
from tests.recipe.verbs import VERBS, said
from tests.recipes import HEAD, changed, faults, project

__all__ = ["project"]


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def zeros(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


SPECIAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe, "it is a named pipe, not a regular file"),
    "directory": (directory, "it is a directory, not a regular file"),
    "device": (zeros, "it is a device, not a regular file"),
    "loop": (loop, "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
def test_a_recipe_that_is_no_file(here: Path, kind: str) -> None:
    make, words = SPECIAL[kind]
    make(here / "odd.yaml")
    command = [sys.executable, "-m", "mlcbuild", "validate", "odd.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, f"odd.yaml: cannot read this file: {words}\n")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_config_that_is_no_file(
    here: Path, capsys: pytest.CaptureFixture[str], kind: str, verb: str
) -> None:
    make, _ = SPECIAL[kind]
    make(here / "models/tiny/config.json")
    (line,) = said(capsys, verb, HEAD)
    words = {
        "pipe": "config.json is a named pipe; ",
        "directory": "config.json is a directory; ",
        "device": "config.json is a device; ",
        "loop": "config.json is a broken link (Too many levels of symbolic links); ",
    }
    assert line.startswith("r.yaml:2:16: model 'tiny': ")
    assert line.endswith(f"{words[kind]}a checkpoint has regular files only")


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_a_lock_that_is_no_file(here: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    SPECIAL[kind][0](here / "r.lock")
    what = SPECIAL[kind][1].removeprefix("it is ").removesuffix(", not a regular file")
    assert said(capsys, "validate", HEAD) == [
        f"r.yaml:1:1: the lock file r.lock is {what}; remove it, or name another one"
    ]


def test_a_damaged_lock_is_found_by_validate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.lock").write_text("version: 1\nsources: {'hf://a/b@main': {commit: x, files: {}}}\n")
    lines = said(capsys, "validate", changed(models="{a: hf://a/b}"))
    assert "r.lock:2:29: a commit is 40 hex digits; restore the file" in "\n".join(lines)


PROMPTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: path.write_bytes(b""), "it holds no prompt; write one on each line"),
    "blank lines": (
        lambda path: path.write_bytes(b"\n \n\t\n"),
        "it holds no prompt; write one on each line",
    ),
    "a byte order mark": (
        lambda path: path.write_bytes(b"\xef\xbb\xbf\r\n"),
        "it holds no prompt; write one on each line",
    ),
    "Latin 1": (
        lambda path: path.write_bytes(b"one\ncaf\xe9\n"),
        "line 2 is not UTF-8 (byte 0xe9); save it as UTF-8",
    ),
    "UTF-16": (
        lambda path: path.write_bytes("hello".encode("utf-16")),
        "line 1 is not UTF-8 (byte 0xff); save it as UTF-8",
    ),
    "too much": (
        lambda path: path.write_bytes(b"x" * (LARGEST_PROMPTS + 1)),
        f"it is larger than {LARGEST_PROMPTS} bytes",
    ),
    "a pipe": (pipe, "it is a named pipe, not a regular file"),
    "a directory": (directory, "it is a directory, not a regular file"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_that_are_none(project: Path, case: str) -> None:
    make, words = PROMPTS[case]
    make(project / "recipes/p.txt")
    assert faults(HEAD + "verify: {prompts: p.txt}\n") == [
        f"5:19: the prompts 'p.txt' must be a text file: {words}"
    ]


def test_prompts_that_cannot_be_opened_are_told_with_the_reason(project: Path) -> None:
    (line,) = faults(HEAD + "verify: {prompts: prompts.txt/x}\n")
    assert line == "5:19: the prompts 'prompts.txt/x' must be a text file: it cannot be read: Not a directory"


def test_prompts_of_spaces(project: Path) -> None:
    assert faults(HEAD + "verify: {prompts: [' ', ' ']}\n") == [
        "5:19: the prompts hold spaces only; write at least one line of text"
    ]
