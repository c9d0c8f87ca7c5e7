"""Tests of the documents: their commands are run, their files are loaded, and the printed outputs are
compared.

A fenced block is tried by its language: `console` (commands after `$ ` and what they print), `python`, `yaml`
(a recipe), `text` (what the block before it printed). An HTML comment before a block changes that: `<!--
tour: file PATH -->` means that the block is the content of that file, `<!-- tour: output of COMMAND -->` that
it is what the command prints, and `<!-- tour: not run: REASON -->` that it is not tried.

In a printed output `...` stands for anything within a line, and alone on a line for any lines. Decimal
numbers, digests, thread counts and cores may differ.
"""

from __future__ import annotations

import os
import queue
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlcbuild.recipe import expand, load
from tests.conftest import ROOT, TINY
from tests.tour import DOCUMENTS, TOURED, Block, blocks, commands

PATIENCE = 120
"""Maximum seconds that one command of a guide may take."""


ELSEWHERE = {
    ("recipes/README.md", "yaml"): (
        14,
        "tests/recipe/test_recipe.py loads thirteen; the comment for editors, here",
    ),
    ("recipes/README.md", "text"): (1, "here"),
    ("recipes/README.md", "python"): (1, "tests/test_session.py"),
    ("targets/README.md", "yaml"): (2, "tests/recipe/test_recipe.py"),
    ("targets/README.md", "text"): (1, "here"),
    ("targets/README.md", "console"): (1, "tests/test_guides.py"),
    ("runtime/README.md", "sh"): (2, "tests/runtime/test_readme.py"),
    ("runtime/README.md", "python"): (4, "tests/runtime/test_readme.py"),
    ("runtime/README.md", "text"): (
        4,
        "the ready line there; `pip install` is what ci/environment does; several bundles in "
        "tests/runtime/test_models.py; `--browser` in tests/runtime/test_browser_page.py",
    ),
    ("runtime/README.md", "js"): (1, "tests/runtime/test_browser_page.py"),
    ("mlcbuild/README.md", "python"): (
        5,
        "tests/models/test_new_family.py, tests/quant/test_new_format.py, tests/test_extension.py, "
        "tests/remotes/test_kinds.py, tests/compiler/test_backends.py",
    ),
}
"""(document, language) of code blocks that are not executed here -> (number of such blocks, where they are
tested)."""


VARYING = {
    r"\.\.\.": r".*",
    r"\d+\.\d+ [kMGT]?B": r"[\d.]+ [kMGT]?B",
    r"\d+\.\d+ s\b": r"(?:\d+(?:\.\d+)? s|\d+ min \d+ s)",
    r"\d+\.\d+(?:e-?\d+)?": r"\d+(?:\.\d+)?(?:e-?\d+)?",
    r"[0-9a-f]{12,}": r"[0-9a-f]{12,}",
    r"\d+ cores": r"\d+ cores",
    r"threads \d+": r"threads \d+",
}
"""The allowed differences between the output that a document shows and the real one: regular expression in
the shown text (such as a decimal number) -> regular expression that the real text must match there."""


def pattern(expected: str) -> str:
    """Returns the regular expression of a stated output. Columns may be wider than stated: a slow machine
    prints "1 minute ago" for "just now".
    """
    varying = re.compile("|".join(f"({shown})" for shown in VARYING))
    instead = list(VARYING.values())
    lines = []
    for line in expected.splitlines():
        pieces, end = [], 0
        for match in varying.finditer(line):
            pieces += [re.escape(line[end : match.start()]), instead[(match.lastindex or 1) - 1]]
            end = match.end()
        pieces.append(re.escape(line[end:]))
        text = re.sub(r"(?:\\ ){2,}", "  +", "".join(pieces))
        lines.append(r"(?:.*\n)*?" if line == "..." else text + r"\n")
    return "".join(lines)


class Shell:
    """A shell process that acts as a reader's terminal: it runs commands one after the other, and keeps its
    directory and variables."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["sh"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def run(self, command: str, until: str | None = None) -> tuple[str, int]:
        """Runs a command. Returns (what it printed, its exit code); for a command in the background, what it
        has printed so far.

        until: regular expression; the function waits until the output matches it.
        """
        assert self._process.stdin is not None
        end = "@@the-end"
        self._process.stdin.write(
            f"{{ {command}\n}} </dev/null\n_code=$?; printf '\\n{end} %d\\n' $_code; (exit $_code)\n"
        )
        self._process.stdin.flush()
        printed, code, deadline = "", None, time.monotonic() + PATIENCE
        while code is None or (until is not None and not re.fullmatch(until, printed)):
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if line.startswith(end):
                code = int(line.split()[1])
                printed = printed.removesuffix("\n")
            else:
                printed += line
        assert code is not None, f"no end of: {command}\n{printed}"
        return printed if printed.endswith("\n") or not printed else printed + "\n", code

    def close(self) -> None:
        """Ends the shell and all processes that it has started."""
        os.killpg(self._process.pid, 9)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@dataclass
class Tour:
    """The execution of one document: runs or checks its code blocks in order, in one shell."""

    shell: Shell
    checkout: Path
    port: int
    printed: str = ""
    """The text that the commands of the previous code block printed, with which a block of expected output is
    compared."""

    def take(self, block: Block) -> None:
        kind, _, rest = block.mark.partition(" ")
        if block.mark.startswith("not run: "):
            return
        if kind == "file":
            self._here(rest).write_text(block.text, encoding="utf-8")
        elif block.mark.startswith("output of "):
            self._expect(block.text, block.mark.removeprefix("output of "))
        else:
            assert not block.mark, f"{block.place}: '{block.mark}' means nothing"
            tries: dict[str, Callable[[Block], None]] = {
                "console": self._console,
                "python": self._python,
                "yaml": self._recipe,
                "text": self._text,
            }
            assert block.language in tries, f"{block.place}: a block of '{block.language}' needs a mark"
            tries[block.language](block)

    def _here(self, path: str) -> Path:
        printed, _ = self.shell.run("pwd")
        return Path(printed.strip()) / path

    def _expect(self, output: str, command: str) -> int:
        """Runs a command in the shell, asserts that its output matches `output` (the text that the document
        shows), and returns its exit code. A command without shown output may print anything."""
        command, output = (text.replace("8000", str(self.port)) for text in (command, output))
        background = command.endswith("&")
        printed, code = self.shell.run(command, pattern(output) if background else None)
        if background or output:
            same = bool(re.fullmatch(pattern(output), printed.rstrip("\n") + "\n"))
            assert same, f"$ {command}\n{printed}\ninstead of\n{output}"
        self.printed = printed
        return code

    def _console(self, block: Block) -> None:
        assert block.text.startswith("$ "), block.place
        # The code of a command that fails is shown by the next one.
        code = 0
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            assert code == 0 or command == "echo $?", f"{block.place}: exit code {code}: {self.printed}"
            code = self._expect(output, command)
        assert code == 0, f"{block.place}: exit code {code}: {self.printed}"

    def _python(self, block: Block) -> None:
        program = self._here("program.py")
        program.write_text(block.text.replace("8000", str(self.port)), encoding="utf-8")
        self.printed, code = self.shell.run(f"{shlex.quote(sys.executable)} program.py")
        assert code == 0, f"{block.place}: {self.printed}"

    def _recipe(self, block: Block) -> None:
        path = self.checkout / "shown.yaml"
        path.write_text(block.text, encoding="utf-8")
        assert expand(load(path)), block.place

    def _text(self, block: Block) -> None:
        same = bool(re.fullmatch(pattern(block.text), self.printed))
        assert same, f"{block.place}: {self.printed}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def shell(directory: Path) -> Iterator[Shell]:
    opened = Shell(directory, commands(directory / "bin"))
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_tour(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "recipes" / "models" / "tiny")
    shutil.copytree(ROOT / "recipes" / "prompts", tmp_path / "recipes" / "prompts")
    with shell(tmp_path) as terminal:
        tour = Tour(terminal, tmp_path, free_port())
        for document in TOURED:
            for block in blocks(document):
                tour.take(block)


def test_every_block_of_the_other_documents_is_tried_somewhere() -> None:
    counts = Counter(
        (document, block.language)
        for document in DOCUMENTS[len(TOURED) :]
        for block in blocks(document)
        if not block.mark
    )
    assert counts == {kind: count for kind, (count, _) in ELSEWHERE.items()}


@pytest.mark.parametrize(
    ("stated", "printed", "same"),
    [
        ("a\n...\nb\n", "a\nb\n", True),
        ("a\n...\nb\n", "a\nx\ny\nb\n", True),
        ("a\n...\n", "x\na\n", False),
        ("1 built in 1.4 s, 592.6 kB\n", "1 built in 12 s, 1 MB\n", True),
        ("1 built\n", "2 built\n", False),
        ("{...name...}\n", '{"name": 1}\n', True),
        ("key 0123456789abcdef\n", "key fedcba9876543210\n", True),
    ],
)
def test_outputs_are_compared_as_stated(stated: str, printed: str, same: bool) -> None:
    assert bool(re.fullmatch(pattern(stated), printed)) == same


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        (Block("x:1", "", "console", "$ false\n$ true\n"), "x:1: exit code 1"),
        (Block("x:1", "", "console", "$ echo a\nb\n"), "instead of"),
        (Block("x:1", "", "sh", "true\n"), "needs a mark"),
        (Block("x:1", "not run", "sh", "true\n"), "means nothing"),
        (Block("x:1", "output of echo 1", "mermaid", "2\n"), "instead of"),
    ],
)
def test_a_wrong_block_fails_the_tour(tmp_path: Path, block: Block, complaint: str) -> None:
    with shell(tmp_path) as terminal, pytest.raises(AssertionError, match=complaint):
        Tour(terminal, tmp_path, 1).take(block)
