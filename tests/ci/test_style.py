"""Tests of ci/style: it reports each kind of finding in a copy of the source tree, and draws random
docstrings by a seed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Returns a small source tree that contains ci/style and one module without faults."""
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "style", tmp_path / "ci" / "style")
    for package in ("mlcbuild", "runtime/mlcbuild_format", "runtime/mlcbuild_runtime"):
        (tmp_path / package).mkdir(parents=True)
    (tmp_path / "mlcbuild" / "clean.py").write_text(
        '"""Returns nothing."""\n\n\nclass One:\n    """The one."""\n'
    )
    return tmp_path


def style(tree: Path, *arguments: str) -> tuple[int, list[str]]:
    result = subprocess.run(
        [sys.executable, tree / "ci" / "style", *arguments], capture_output=True, text=True, check=False
    )
    assert not result.stderr
    return result.returncode, result.stdout.splitlines()


FINDINGS = {
    "docstring": ('"""Of the thing."""\n', "1: a docstring must not begin with 'Of'"),
    "attribute": ('x = 1\n"""What it is."""\n', "2: a docstring must not begin with 'What'"),
    "name": ("found = 1\n", "1: the name 'found' does not say what the value is"),
    "vague name": ("own = 1\n", "1: the name 'own' does not say what the value is"),
    "parameter": ("def f(given):\n    pass\n", "1: the parameter 'given' does not say what the value is"),
    "member": (
        "class A:\n    pass\n\n\nA.seen = 1\n",
        "5: the attribute 'seen' does not say what the value is",
    ),
    "comparison": ('"""As the other one."""\n', "1: a docstring must not begin with 'As'"),
    "unit": ('x = 1\n"""Bytes."""\n', "2: a docstring must say what is measured, not only its unit"),
    "class": ("class One:\n    pass\n", "1: a class One is in mlcbuild/clean.py, too"),
}


SIZES = {
    "file": ("x = 1\n" * 401, "1: the file has 401 lines, at most 400 are allowed"),
    "function": (
        "def f():\n    x = 1" + "\n    x = 1" * 39 + "\n",
        "1: f has 41 lines, at most 40 are allowed",
    ),
    "method": (
        "class Two:\n    async def g(self):" + "\n        x = 1" * 40 + "\n",
        "2: Two.g has 41 lines, at most 40 are allowed",
    ),
    "fields": (
        "class Two:\n" + "".join(f"    a{n}: int\n" for n in range(13)),
        "1: Two has 13 attributes, at most 12 are allowed",
    ),
    "assigned": (
        "class Two:\n    b = c = 0\n    def g(self):\n"
        + "".join(f"        self.a{n} = 0\n" for n in range(11)),
        "1: Two has 13 attributes, at most 12 are allowed",
    ),
}
ADVICE = ": divide it by idea, or add a reason to LARGER"


@pytest.mark.parametrize("name", list(SIZES))
def test_what_is_too_large_needs_a_reason(tree: Path, name: str) -> None:
    source, sentence = SIZES[name]
    (tree / "mlcbuild" / "wrong.py").write_text(source)
    assert style(tree) == (1, [f"mlcbuild/wrong.py:{sentence}{ADVICE}"])
    with_reason(tree, sentence.split()[1] if name != "file" else "")
    assert style(tree) == (0, [])


def test_docstrings_do_not_count(tree: Path) -> None:
    source = "def f():\n" + '    """Returns.\n\n' + "    More.\n" * 40 + '    """\n    return 1\n'
    (tree / "mlcbuild" / "wrong.py").write_text(source)
    assert style(tree) == (0, [])


def test_a_reason_for_what_is_not_too_large_goes(tree: Path) -> None:
    (tree / "mlcbuild" / "wrong.py").write_text("x = 1\n")
    with_reason(tree, "f")
    sentence = "mlcbuild/wrong.py:1: 'mlcbuild/wrong.py: f' is within the limits: remove it from LARGER"
    assert style(tree) == (1, [sentence])


def test_reasons_name_files_that_exist() -> None:
    script = (ROOT / "ci" / "style").read_text()
    paths = re.findall(r'^    "(\S+\.py)(?:: \S+)?": "', script.partition("LARGER = ")[2], re.MULTILINE)
    assert paths and not [path for path in paths if not (ROOT / path).is_file()]


def with_reason(tree: Path, name: str) -> None:
    """Adds an exception to the source of ci/style, in its table LARGER of files and definitions that may
    exceed the size limit: for the file wrong.py, or for the definition `name` in it if that is not empty.
    tree: copy of the source tree."""
    script = tree / "ci" / "style"
    place = "mlcbuild/wrong.py" + (f": {name}" if name else "")
    script.write_text(script.read_text().replace("LARGER = {", f'LARGER = {{"{place}": "",', 1))


@pytest.mark.parametrize("name", list(FINDINGS))
def test_a_finding_has_a_place_and_a_reason(tree: Path, name: str) -> None:
    assert style(tree) == (0, [])
    source, sentence = FINDINGS[name]
    (tree / "mlcbuild" / "wrong.py").write_text(source)
    code, lines = style(tree)
    assert code == 1 and len(lines) == 1 and lines[0].startswith(f"mlcbuild/wrong.py:{sentence}")


def test_programs_are_checked_for_docstrings_and_names(tree: Path) -> None:
    (tree / "tests").mkdir()
    (tree / "tests" / "test_one.py").write_text('"""What it does."""\n\nfound = 1\n')
    (tree / "ci" / "script").write_text('#!/usr/bin/env python3\n"""Of the thing."""\n')
    code, lines = style(tree)
    assert code == 1
    assert [line.partition(":")[0] for line in lines] == [
        "tests/test_one.py",
        "ci/script",
        "tests/test_one.py",
    ]


def test_a_file_name_stands_once(tree: Path) -> None:
    (tree / "runtime" / "mlcbuild_runtime" / "clean.py").write_text("")
    assert style(tree)[1] == [
        "runtime/mlcbuild_runtime/clean.py:1: a file of this name is mlcbuild/clean.py, too"
    ]


def test_names_of_one_thing_may_stand_in_several_rooms(tree: Path) -> None:
    for room in ("mlcbuild", "runtime/mlcbuild_runtime"):
        (tree / room / "errors.py").write_text("class SetupError(Exception):\n    pass\n")
    assert style(tree) == (0, [])


def test_subjects_of_commits(tree: Path) -> None:
    script = tree / "ci" / "style"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b.example", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "s" * 90)
    old = next(line for line in script.read_text().splitlines() if line.startswith("RULES_SINCE"))
    script.write_text(script.read_text().replace(old, f'RULES_SINCE = "{git("rev-parse", "HEAD")}"'))
    git("commit", "-qam", "t" * 72)
    assert style(tree) == (0, [])
    git("commit", "-qm", "u" * 73, "--allow-empty")
    assert style(tree) == (1, [f"commit subject of 73 characters, at most 72 are allowed: {'u' * 73}"])


def test_docstrings_are_drawn_with_a_seed(tree: Path) -> None:
    first = style(tree, "--docstrings", "2")
    assert first == style(tree, "--docstrings", "2") and first[0] == 0
    assert sorted(line for line in first[1] if line != "---") == ["Returns nothing.", "The one."]


def test_docstrings_are_drawn_from_one_directory(tree: Path) -> None:
    (tree / "tests").mkdir()
    (tree / "tests" / "test_one.py").write_text('"""Tests one."""\n')
    assert style(tree, "--docstrings", "1", "--under", str(tree / "tests")) == (0, ["Tests one.", "---"])
