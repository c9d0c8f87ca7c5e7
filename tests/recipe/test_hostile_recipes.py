"""Tests that a faulty or hostile recipe is refused before any work, with all problems at once and within
bounds of time and memory."""

from __future__ import annotations

import json
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
from tests.build.test_scale import calls
from tests.libharness import EVERY
from tests.recipe.verbs import VERBS, said
from tests.recipes import HEAD, changed, faults, project, read

__all__ = ["project"]


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


SIZES = (200, 400, 800) if EVERY else (100, 200, 400)
"""Numbers of items in the recipes whose costs are compared."""
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
    """Checks that the time for checking a recipe grows linearly, measured in function calls, up to the number
    of problems at which reading ends."""

    def work(count: int) -> Callable[[], None]:
        Path("recipes/q.yaml").write_text(MANY[what](count))

        def check() -> None:
            try:
                load(Path("recipes/q.yaml"))
            except InputError as error:
                assert error.problems

        return check

    work(10)()  # performs what happens once in a process, such as imports
    small, middle, large = (calls(work(count)) for count in SIZES)
    assert (large - middle) < 2.3 * (middle - small)


def test_nothing_that_a_recipe_says_controls_the_terminal(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that no text of a recipe can control the terminal, wherever it stands: in a key, a name, a path,
    a command-line value or the file's name."""
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
    """Checks that a message which quotes a very long name is cut in the middle, so that its place and its
    remedy remain."""
    long = f"rope_type: '{'x' * 100_000}' is not supported; did you mean 'llama3'?"
    lines = [str(Problem("r.yaml", 3, 7, long)), *str(CheckpointError(f"{long}\n{long}")).split("\n")]
    assert len(lines) == 3 and lines[0].startswith("r.yaml:3:7: rope_type: 'xxx")
    for line in lines:
        assert len(line) < LONGEST_MESSAGE and line.endswith("did you mean 'llama3'?")
