"""A clumsy or hostile recipe is refused before any work, all at once, in bounded time and memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlcbuild.cli import main
from mlcbuild.documents.document import MAX_BYTES
from mlcbuild.errors import (
    LONGEST_MESSAGE,
    MOST_PROBLEMS,
    CheckpointError,
    InputError,
    Problem,
    Problems,
    did_you_mean,
    one_line,
)
from mlcbuild.recipe import MOST_OVERRIDES, load, sources
from mlcbuild.recipe.matrix import MOST_SETTINGS
from mlcbuild.recipe.reading import LONGEST_NAME
from mlcbuild.recipe.settings import LARGEST_PROMPTS
from tests.build.test_scale import calls
from tests.recipes import HEAD, changed, faults, project, read

__all__ = ["project"]

MODEL = Path(__file__).parent.parent.parent / "recipes" / "models" / "tiny"
VERBS = ("validate", "plan", "run")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a directory with a whole model beside the recipe."""
    shutil.copytree(MODEL, tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLCBUILD_STORE", str(tmp_path / "store"))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], verb: str, text: str) -> list[str]:
    """Returns what a verb says of a recipe with faults."""
    Path("r.yaml").write_text(text)
    assert main([verb, "r.yaml"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert not Path("dist").exists()
    return err.splitlines()


# files that are no files


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


# paths

LONG = "a" * (LONGEST_NAME + 1)
PATHS = {
    "a long name": (
        f"dist/{LONG}",
        f"'dist/{LONG}' has the part '{LONG[:40]}...' of {len(LONG)} bytes; "
        f"at most {LONGEST_NAME} are allowed",
    ),
    "bytes count, not letters": (
        f"dist/{'é' * 121}",
        f"'dist/{'é' * 121}' has the part '{'é' * 40}...' of 242 bytes; at most {LONGEST_NAME} are allowed",
    ),
    "a line break": (
        '"dist/a\\nb"',
        "'dist/a\\nb' holds an invisible character; a path has visible letters and spaces only",
    ),
    "an escape": (
        '"dist/\\xa0{model}"',
        "'dist/\\xa0x' holds an invisible character; a path has visible letters and spaces only",
    ),
    "backslashes": (
        "dist\\..\\x",
        "'dist\\..\\x' holds a '\\': write '/' between the parts of a path",
    ),
}


@pytest.mark.parametrize("case", PATHS)
def test_outputs_that_cannot_be(project: Path, case: str) -> None:
    written, words = PATHS[case]
    quoted = written if written.startswith('"') else f"'{written}'"
    assert faults(HEAD + f"bundle: {{output: {quoted}}}\n") == [f"5:18: {words}"]


def test_outputs_that_names_make_too_long(project: Path) -> None:
    name = "m" * 64
    text = changed(models=f"{{{name}: models/tiny}}")
    (line,) = faults(text + f"bundle: {{output: 'd/{'{model}' * 4}'}}\n")
    assert line.startswith(f"5:18: the output 'd/{name * 4}' of {name}/q4f16_1/x86-64-v3 has the part '")
    assert line.endswith(f"of 256 bytes; at most {LONGEST_NAME} are allowed; shorten it")
    (line,) = faults(text + f"bundle: {{output: '{'{model}/' * 70}x'}}\n")
    assert " bytes long below " in line


def test_an_output_that_stands_in_the_way(project: Path) -> None:
    Path("recipes/dist").write_text("")
    (line,) = faults(HEAD)
    assert line == (
        "1:1: the output 'dist/tiny-q4f16_1-x86-64-v3' lies below "
        f"{project.resolve()}/recipes/dist, which is a regular file"
    )
    Path("recipes/out").mkdir()
    Path("recipes/out/tiny").write_text("")
    assert faults(HEAD + "bundle: {output: 'out/{model}'}\n") == [
        "5:18: the output 'out/tiny' is a regular file; move it away, or choose another output"
    ]


def test_a_long_name_of_the_recipe_makes_a_longer_lock(project: Path) -> None:
    path = Path("recipes") / f"{'r' * 252}.y"
    path.write_text(HEAD)
    with pytest.raises(InputError, match=f"of 257 bytes; at most {LONGEST_NAME} are allowed"):
        load(path)


# all at once


@pytest.mark.parametrize("verb", VERBS)
def test_faults_of_recipe_prompts_and_config_are_told_together(
    here: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    config = json.loads((here / "models/tiny/config.json").read_text())
    (here / "models/tiny/config.json").write_text(json.dumps({**config, "swirl": 2, "a\nb\x1b[31m": 1}))
    Path("empty.txt").write_text("")
    text = HEAD + "verify: {prompts: empty.txt}\nbench: {prompt_tokens: 0}\n"
    lines = said(capsys, verb, text)
    assert [line.partition(": ")[0] for line in lines] == [
        "r.yaml:2:16",
        "r.yaml:2:16",
        "r.yaml:5:19",
        "r.yaml:6:24",
    ]
    assert "config.json: a\\nb\\x1b[31m: unknown to family" in lines[0]
    assert "config.json: swirl: unknown to family" in lines[1]


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_model_cannot_hold_is_found_by_every_verb(
    here: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    (line,) = said(capsys, verb, HEAD + "compile: {context_window: 1000000}\n")
    assert "r.yaml:2:16: model 'tiny' takes at most " in line


# sizes


def test_variables_make_no_more_than_a_file_may_hold(project: Path) -> None:
    size = MAX_BYTES // 4
    models = ", ".join(f"m{i}: '${{a}}'" for i in range(1000))
    text = f"{changed(models=f'{{{models}}}')}vars: {{a: {'x' * size}}}\n"
    actual = faults(text)
    assert len(actual) == 4  # three sources that are too long themselves, and this
    assert actual[-1] == (
        f"2:50: up to here variables make more than {MAX_BYTES} letters, the limit: 'a' stands for {size}; "
        "shorten it, or use it less often"
    )


def test_variables_within_one_text_count(project: Path) -> None:
    text = HEAD + f"vars: {{a: {'x' * 1000}}}\nname: '{'${a}' * (MAX_BYTES // 500)}'\n"
    (line,) = faults(text)
    assert line.startswith(f"6:7: up to here variables make more than {MAX_BYTES} letters")


def test_a_source_of_many_models_is_looked_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    original = sources._read_source

    def watched(reading: Any, where: Any, text: str, siblings: Any) -> Any:
        looks.append(text)
        return original(reading, where, text, siblings)

    monkeypatch.setattr(sources, "_read_source", watched)
    models = ", ".join(f"m{i}: models/tiny" for i in range(50))
    assert len(read(changed(models=f"{{{models}}}")).models) == 50
    assert looks == ["models/tiny"]
    models = ", ".join(f"m{i}: models/none" for i in range(3))
    actual = faults(changed(models=f"{{{models}}}"))
    assert len(actual) == 3 and all("there is no directory 'models/none'" in line for line in actual)


def test_references_of_a_schema_are_resolved_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(*_: object) -> None:
        raise AssertionError("a reference is resolved for each value")

    monkeypatch.setattr("referencing._core.Resolver.lookup", lookup)
    assert len(read(changed(models="{a: models/tiny, b: {source: models/tiny}}")).models) == 2
    actual = faults(changed(models="{a: models/tiny, b: {source: models/tiny, revision: 2}}"))
    assert "the key 'revision' is unknown" in actual[0]


def test_settings_of_combinations_are_bounded(project: Path) -> None:
    models = ", ".join(f"m{i}: models/tiny" for i in range(1100))
    entries = "  - {target: x86-64-v3, compile: {max_batch: 2}}\n" * 1000
    (line,) = faults(changed(models=f"{{{models}}}") + f"matrix:\n  include:\n{entries}")
    assert f"settings from include entries more than {MOST_SETTINGS} times" in line


def test_excludes_cost_their_number_and_not_their_product(project: Path) -> None:
    models = ", ".join(f"m{i}: models/tiny" for i in range(2000))
    entries = "  - {target: x86-64-v3}\n" * 2000
    assert faults(changed(models=f"{{{models}}}") + f"matrix:\n  exclude:\n{entries}") == [
        "5:1: the matrix is empty: nothing would be built"
    ]


def test_overrides_and_prompts_are_bounded_over_the_matrix(project: Path) -> None:
    models = ", ".join(f"m{i}: models/tiny" for i in range(201))
    overrides = ", ".join(f"{{match: x{i}, scheme: q0f16}}" for i in range(500))
    text = changed(
        models=f"{{{models}}}", quantizations=f"{{q: {{scheme: q4f16_1, overrides: [{overrides}]}}}}"
    )
    assert faults(text + f"verify: {{prompts: ['{'x' * 400_000}']}}\n") == [
        f"3:1: combinations and their overrides are {201 * 500}; at most {MOST_OVERRIDES} are allowed",
        f"5:1: prompts of all combinations have {201 * 400_000} letters; write them to a file and name that",
    ]


@pytest.mark.parametrize(
    ("section", "limit"),
    [
        ("publish: [" + "{to: 'hf://a/b'}, " * 33 + "]", "'publish' must have at most 32 items, not 33"),
        (
            "cache: {remotes: [" + "{url: 'file:///x'}, " * 33 + "]}",
            "'remotes' must have at most 32 items, not 33",
        ),
    ],
)
def test_lists_have_limits(project: Path, section: str, limit: str) -> None:
    (line,) = faults(HEAD + section + "\n")
    assert line.endswith(limit)


# many problems


def test_a_thousand_problems_are_listed() -> None:
    problems = Problems(Problem("f", i, 1, "wrong") for i in range(1, MOST_PROBLEMS + 1))
    with pytest.raises(InputError) as caught:
        problems.append(Problem("f", 9999, 1, "wrong"))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"f: it has more than {MOST_PROBLEMS} problems; correct these, and check it again"
    assert len(lines) == MOST_PROBLEMS + 1


def test_known_names_are_listed_and_compared_within_bounds() -> None:
    entries = [f"name{i:05}" for i in range(20_000)]
    assert did_you_mean("x", entries).endswith(" and 19970 more")
    assert did_you_mean("name00001x", entries) == "did you mean 'name00001'?"
    assert did_you_mean("y" * 100_000, ["y" * 100_000 + "z"]) == f"known: {'y' * 100}..."


def test_one_line_escapes_what_cannot_be_seen() -> None:
    assert one_line("a\nb\x1b[31m\u202ec\ud800 é") == "a\\nb\\x1b[31m\\u202ec\\ud800 é"


MANY: dict[str, Callable[[int], str]] = {
    "models": lambda n: changed(models="{" + ", ".join(f"m{i}: models/tiny" for i in range(n)) + "}"),
    "missing directories": lambda n: changed(
        models="{" + ", ".join(f"m{i}: nowhere{i}" for i in range(n)) + "}"
    ),
    "unknown keys": lambda n: HEAD + "".join(f"k{i}: 1\n" for i in range(n)),
    "unknown names": lambda n: HEAD + f"matrix: {{model: [{', '.join(f'x{i}' for i in range(n))}]}}\n",
    "mixed items": lambda n: HEAD + f"matrix: {{model: [{', '.join(f'{i}, [a{i}]' for i in range(n))}]}}\n",
    "include entries": lambda n: (
        changed(models="{" + ", ".join(f"m{i}: models/tiny" for i in range(n)) + "}")
        + "matrix:\n  include:\n"
        + "".join(f"  - {{model: m{i}, compile: {{max_batch: 2}}}}\n" for i in range(n))
    ),
    "variables": lambda n: (
        HEAD + f"vars: {{{', '.join(f'v{i}: 1' for i in range(n))}}}\nname: '{'${v0}' * n}'\n"
    ),
}


@pytest.mark.parametrize("what", MANY)
def test_checking_is_linear(project: Path, what: str) -> None:
    """Counted in calls of functions; below the number of problems that ends a reading, and not beyond it."""

    def work(count: int) -> Callable[[], None]:
        Path("recipes/q.yaml").write_text(MANY[what](count))

        def check() -> None:
            try:
                load(Path("recipes/q.yaml"))
            except InputError as error:
                assert error.problems

        return check

    work(10)()  # what is imported or read once
    small, middle, large = (calls(work(count)) for count in (200, 400, 800))
    assert (large - middle) < 2.3 * (middle - small)


def test_nothing_that_a_recipe_says_controls_the_terminal(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it stands: in a key, a name, a path, a value of the command line, the name of the file."""
    evil = "a\x9b31m\n\u202eb"
    quoted = json.dumps(evil)
    text = (
        f"version: {quoted}\n{quoted}: 1\nmodels: {{{quoted}: {quoted}}}\nquantizations: [{quoted}]\n"
        f"targets: [{quoted}]\nverify: {{prompts: {quoted}}}\nbundle: {{output: {quoted}}}\n"
        f"publish: [{{to: {quoted}}}]\ncache: {{remotes: [{{url: {quoted}}}]}}\nlock: {quoted}\n"
        "vars: {v: 1}\n"
    )
    name = "r\x1b]0;x\x07.yaml"
    Path(name).write_text(text)
    assert main(["validate", name, "--set", "w=\x1b[2J\n"]) == 2
    out, err = capsys.readouterr()
    lines = err.split("\n")
    assert len(lines) > 10
    assert not out
    assert all(line.isprintable() and line.startswith("r\\x1b") for line in lines[:-1])
    assert main(["plan", "no\x1b[31m.yaml"]) == 2
    assert capsys.readouterr().err.startswith("no\\x1b[31m.yaml: cannot read this file")


@pytest.mark.parametrize("verb", ["validate", "plan"])
def test_what_is_within_all_limits_passes(here: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    Path("p.txt").write_text("\ufeffHello\u3000there\n")
    output = "a" * LONGEST_NAME
    Path("r.yaml").write_text(HEAD + f"verify: {{prompts: p.txt}}\nbundle: {{output: {output}}}\n")
    assert main([verb, "r.yaml"]) == 0


def test_a_long_quotation_leaves_place_and_remedy() -> None:
    """A file may hold a name of megabytes, and messages quote names."""
    long = f"rope_type: '{'x' * 100_000}' is not supported; did you mean 'llama3'?"
    lines = [str(Problem("r.yaml", 3, 7, long)), *str(CheckpointError(f"{long}\n{long}")).split("\n")]
    assert len(lines) == 3 and lines[0].startswith("r.yaml:3:7: rope_type: 'xxx")
    for line in lines:
        assert len(line) < LONGEST_MESSAGE and line.endswith("did you mean 'llama3'?")
