"""The documents as they stand: commands are run, files are loaded, stated outputs are compared.

A fenced block is tried by its language: `console` (commands after `$ ` and what they print), `python`,
`yaml` (a recipe), `text` (what the block before it printed). A comment before a block, which readers do not
see, makes it something else:

    <!-- tour: file PATH -->            the block is the content of that file
    <!-- tour: output of COMMAND -->    the block is what the command prints
    <!-- tour: not run: REASON -->      nothing is tried

In a stated output `...` stands for anything within a line, and alone on a line for any lines. Decimal
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
from xml.etree import ElementTree

import pytest

from mlcbuild.cli import VERBS, parser
from mlcbuild.errors import InputError
from mlcbuild.recipe import expand, load
from mlcbuild.targets import presets, requirements
from tests.conftest import ROOT, TINY

TOURED = ("README.md", "recipes/TOUR.md", "ci/README.md")
"""Documents whose blocks are executed in this order, in one shell."""
DOCUMENTS = (
    *TOURED,
    "recipes/README.md",
    "targets/README.md",
    "runtime/README.md",
    "mlcbuild/README.md",
)
PATIENCE = 120
"""Maximum seconds that one command of a guide may take."""

ELSEWHERE = {
    ("recipes/README.md", "yaml"): (
        12,
        "tests/recipe/test_recipe.py loads eleven; the comment for editors, here",
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
"""Blocks that other tests try: how many, and where."""


@dataclass(frozen=True)
class Block:
    place: str
    mark: str
    """The words of the comment before it, after "tour: "."""
    language: str
    text: str


RESULTS = re.compile(r"<!-- results: .*?<!-- end of results -->", re.DOTALL)
"""Tables that ci/bench/results has made; tests/ci/test_results.py compares them."""


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    results = []
    for match in re.finditer(
        r"^(?:<!-- tour: ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    ):
        line = text.count("\n", 0, match.start()) + 1
        results.append(Block(f"{document}:{line}", match[1] or "", match[2], match[3]))
    assert 2 * len(results) == len(re.findall(r"^\s*```", text, re.MULTILINE)), "a block was not understood"
    comments = RESULTS.sub("", text).count("<!--")
    assert sum(bool(block.mark) for block in results) == comments, "a comment was not understood"
    return results


VARYING = {
    r"\.\.\.": r".*",
    r"\d+\.\d+ [kMGT]?B": r"[\d.]+ [kMGT]?B",
    r"\d+\.\d+ s\b": r"(?:\d+(?:\.\d+)? s|\d+ min \d+ s)",
    r"\d+\.\d+(?:e-?\d+)?": r"\d+(?:\.\d+)?(?:e-?\d+)?",
    r"[0-9a-f]{12,}": r"[0-9a-f]{12,}",
    r"\d+ cores": r"\d+ cores",
    r"threads \d+": r"threads \d+",
}
"""A pattern in a stated output that may differ -> a pattern of the text that may stand there instead."""


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
    """One sh, as a reader's terminal: commands follow each other, and directories and variables stay."""

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
        """Returns what a command printed, and its exit code; of one in the background, what it printed so
        far.

                With `until`, waits until the output matches that.
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
        """Ends the shell and all that it started."""
        os.killpg(self._process.pid, 9)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@dataclass
class Tour:
    """Goes through the blocks of one document."""

    shell: Shell
    checkout: Path
    port: int
    printed: str = ""
    """The output of the commands in the block before."""

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
        """Runs a command, asserts that its output is the stated one, and returns its exit code."""
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


def commands(directory: Path) -> dict[str, str]:
    """Returns an environment in which `mlcbuild` is a command, and nothing of a user is set."""
    directory.mkdir()
    command = directory / "mlcbuild"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mlcbuild "$@"\n')
    command.chmod(0o755)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MLCBUILD_")}
    path = os.pathsep.join([str(directory), os.environ["PATH"]])
    return {**outer, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}


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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_sentences_are_right(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for command in re.findall(r"`mlcbuild ([a-z][^`]*)`", text):
        words = shlex.split(command)
        assert words[0] in VERBS, command
        if len(words) > 1:
            parser().parse_args(words)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    here = (ROOT / document).parent
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (here / link).exists(), link
    for path in re.findall(r"`((?:mlcbuild|runtime|tests|recipes|targets|ci)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_functions_named_by_the_guide_exist() -> None:
    """The guide names a function as `name` in `path`."""
    text = (ROOT / "mlcbuild" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)` in `([\w./]+\.py)`", text)
    assert len(named) > 30
    definition = r"^ *(?:async )?(?:def|class) {0}\b|^{0}\b.*="
    for name, path in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(definition.format(name), source, re.MULTILINE), (name, path)


def test_the_guide_lists_every_room() -> None:
    text = (ROOT / "mlcbuild" / "README.md").read_text(encoding="utf-8")
    rooms = [path.parent for path in (ROOT / "mlcbuild").glob("*/__init__.py")]
    runtime = [path.parent for path in (ROOT / "runtime" / "mlcbuild_runtime").glob("*/__init__.py")]
    for name in [f"{room.name}/" for room in rooms] + [f"{room.relative_to(ROOT)}/" for room in runtime]:
        assert f"| `{name}` |" in text, name


def test_the_guides_name_every_verb_variable_and_exit_code() -> None:
    text = "\n".join((ROOT / document).read_text(encoding="utf-8") for document in TOURED)
    for verb in VERBS:
        assert re.search(rf"\bmlcbuild {verb}\b|`{verb}`", text), verb
    sources = [*(ROOT / "mlcbuild").rglob("*.py"), *(ROOT / "runtime").rglob("mlcbuild_*/**/*.py")]
    used = {name for path in sources for name in re.findall(r"MLCBUILD_[A-Z_]+", path.read_text())}
    assert used == set(re.findall(r"^\| `(MLCBUILD_\w+)(?:<HOST>)?`", text, re.MULTILINE))
    codes = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert codes == ["0", "1", "2", "3", "130"]


def test_messages_shown_for_recipes_are_those_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = (block.text for block in blocks("recipes/README.md") if block.language == "text")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "q.yaml").write_text(
        "version: 1\nmodels: {tiny: ./tiny}\nquantizations: [q4f61_1]\ntargets: [host]\n"
        "compile: {prefill_chunk: '512'}\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        expand(load(Path("q.yaml")))
    assert [problem.message for problem in caught.value.problems] == [
        line.split(": ", 1)[1] for line in shown.splitlines()
    ]


def test_the_sentence_about_a_lacking_instruction_is_that_of_the_program() -> None:
    (shown,) = (block.text for block in blocks("targets/README.md") if block.language == "text")
    machines = presets.presets()
    assert requirements.why_not(machines["x86-64-v4-vnni"], machines["x86-64-v4"]) == shown.strip()


def test_the_comment_for_editors_names_the_schema() -> None:
    (shown,) = (block.text for block in blocks("recipes/README.md") if block.text.startswith("#"))
    assert (ROOT / "recipes" / shown.strip().partition("$schema=")[2]).is_file()


# What `ci/quickstart` does, without its downloads.


@pytest.mark.parametrize("script", ["ci/quickstart", "ci/environment", "ci/check", "ci/test"])
def test_scripts_are_portable_shell(script: str) -> None:
    assert subprocess.run(["sh", "-n", ROOT / script], check=False).returncode == 0
    assert (ROOT / script).read_text().startswith("#!/bin/sh\n")
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize(("checked", "tested", "code"), [(0, 0, 0), (1, 0, 1), (0, 5, 5), (3, 5, 5)], ids=str)
def test_faults_of_style_fail_the_tests_beside_which_they_are_looked_for(
    checked: int, tested: int, code: int, tmp_path: Path
) -> None:
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "test", tmp_path / "ci")
    (tmp_path / "ci" / "environment").write_text(f"echo {tmp_path}/python\n")
    (tmp_path / "ci" / "check").write_text(f"echo style; exit {checked}\n")
    (tmp_path / "python").write_text(
        f'#!/bin/sh\ncase "$*" in -c*) echo 4;; *) echo "$@"; exit {tested};; esac\n'
    )
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        ["sh", tmp_path / "ci" / "test", "tests/a b.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert sorted(done.stdout.splitlines()) == [
        "-m pytest --numprocesses=4 --dist=loadgroup tests/a b.py",
        "style",
    ]
    assert done.stderr == ("ci/check found faults of style or types: see above\n" if checked else "")


def environment_with(programs: dict[str, str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs `ci/environment` on a machine that has only these programs: name -> the lines of a script."""
    place = directory / "programs"
    place.mkdir()
    for name, lines in programs.items():
        (place / name).write_text(f"#!/bin/sh\n{lines}\n")
        (place / name).chmod(0o755)
    sh = shutil.which("sh")
    assert sh is not None
    return subprocess.run(
        [sh, ROOT / "ci" / "environment", ".venv"],
        cwd=directory,
        env={"PATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("programs", "complaint"),
    [
        ({}, "Python 3.11 or newer is missing: install it"),
        ({"python3": "exit 1", "ld": ""}, "Python 3.11 or newer is missing: install it"),
        ({"python3": 'case "$2" in *venv*) exit 1;; esac'}, "Python's venv module is missing: install it"),
        ({"python3": ""}, "A linker is missing: install one"),
    ],
)
def test_what_a_machine_lacks_is_said(tmp_path: Path, programs: dict[str, str], complaint: str) -> None:
    done = environment_with(programs, tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith(complaint)
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_quickstart_builds_and_its_advice_is_right(
    tmp_path: Path, tiny_bundles: Path, common_store: Path
) -> None:
    """The script itself; in the place of the environment that it makes, this one."""
    checkout, bin_ = tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(ROOT / "recipes", checkout / "recipes", ignore=shutil.ignore_patterns("dist"))
    (checkout / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "quickstart", checkout / "ci")
    environment = {**commands(bin_), "MLCBUILD_STORE": str(common_store)}
    (bin_ / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (bin_ / "python").chmod(0o755)
    (checkout / "ci" / "environment").write_text(f"echo {shlex.quote(str(bin_ / 'python'))}\n")
    done = subprocess.run(
        [checkout / "ci" / "quickstart"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built, _, advice = done.stdout.partition("\nNow try:\n")
    assert built.splitlines()[-1].endswith("; 3 bundles in recipes/dist")
    lines = [shlex.split(line) for line in advice.splitlines()]
    assert [words[1] for words in lines] == ["chat", "serve", "inspect"]
    for words in lines:
        parsed = parser().parse_args(words[1:])
        (bundle,) = parsed.bundles if words[1] == "serve" else [parsed.bundle]
        assert (Path(bundle) / "bundle.json").is_file()
        assert Path(words[0]) == bin_ / "mlcbuild"
    inspect = subprocess.run(lines[-1], env=environment, capture_output=True, text=True, check=True)
    assert inspect.stdout.startswith("name       tiny-q4a8_1-host\n")


FRONT_WORDS = 1000
"""Words of the front page without its tables of results: about two screens of prose."""


def test_the_front_page_is_short_and_its_picture_is_there_in_both_colours() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(RESULTS.sub("", text).split()) <= FRONT_WORDS
    pictures = re.findall(r'(?:srcset|src)="([^"]+)"', text)
    assert len(pictures) == 2
    words = [ElementTree.parse(ROOT / path).getroot().itertext() for path in pictures]
    light, dark = ([word.strip() for word in drawing if word.strip()] for drawing in words)
    assert light == dark
    assert {"recipe.yaml", "matrix", "shared steps", "bundles", "server"} <= set(light)


def test_headings_that_links_name_exist() -> None:
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
            target_text = ((ROOT / document).parent / path).read_text(encoding="utf-8") if path else text
            headings = re.findall(r"^#+ (.+)$", target_text, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in headings}
