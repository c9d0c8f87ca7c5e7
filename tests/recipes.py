"""Recipes and helper functions that several tests of recipes share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from mlcbuild.documents.document import parse
from mlcbuild.errors import InputError, Problems
from mlcbuild.recipe import Recipe, load
from mlcbuild.recipe.reading import Reading

ROOT = Path(__file__).parent.parent

HEAD = """\
version: 1
models: {tiny: models/tiny}
quantizations: [q4f16_1]
targets: [x86-64-v3]
"""
"""A complete recipe of four lines, so that tests add faulty text from line 5 on."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a Git checkout with two models, a GGUF file, adapters and prompts. Returns the recipe's
    directory, which is below the checkout's top."""
    home = tmp_path / "project"
    adapters = ("recipes/adapters/style", "recipes/adapters/facts")
    for directory in (".git", "recipes/models/tiny", "recipes/models/other", "shared", *adapters):
        (home / directory).mkdir(parents=True)
    (home / "recipes" / "prompts.txt").write_text("Hello\n")
    (home / "recipes" / "downloads").mkdir()
    (home / "recipes" / "downloads" / "SmolLM2-135M-Instruct.Q4_K_M.gguf").touch()
    monkeypatch.chdir(home)
    return home


def read(
    text: str, name: str = "recipes/q.yaml", outside: bool = False, values: Mapping[str, str] | None = None
) -> Recipe:
    path = Path(name)
    path.write_bytes(text.encode())
    return load(path, values, outside)


def reading(text: str) -> Reading:
    """Returns a recipe's text in the form in which the readers of its sections receive it, without the checks
    of the schema."""
    directory = Path("/project")
    document = parse(text.encode(), "q.yaml")
    return Reading(document, directory, directory, False, frozenset(), frozenset(), {}, Problems())


def reported(recipe: Reading) -> list[str]:
    """Returns the problems that were reported while the sections of a recipe were read, each as `line:column:
    message`."""
    return [str(problem).removeprefix("q.yaml:") for problem in recipe.problems]


def faults(text: str, **values: str) -> list[str]:
    """Reads a recipe that must be refused, and returns `line:column: message` of every problem."""
    with pytest.raises(InputError) as caught:
        read(text, values=values)
    problems = caught.value.problems
    assert {problem.file for problem in problems} == {"recipes/q.yaml"}
    assert str(caught.value) == "\n".join(map(str, problems))
    return [str(problem).removeprefix("recipes/q.yaml:") for problem in problems]


def changed(**sections: str) -> str:
    """Returns the text of the recipe HEAD, a complete recipe of four lines, with some sections replaced.
    sections: name of a top-level section -> its new value, as YAML text. Names that HEAD lacks are
    ignored."""
    return "".join(
        f"{line.partition(':')[0]}: {sections.get(line.partition(':')[0], line.partition(': ')[2])}\n"
        for line in HEAD.splitlines()
    )


NAME_RULE = "must be letters, digits, '.', '_' and '-', not starting with '.'"


def readme_recipes() -> list[str]:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "recipes" / "README.md").read_text(), re.DOTALL)
    return [block for block in blocks if block.startswith("version:")]
