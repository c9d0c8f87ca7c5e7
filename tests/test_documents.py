"""Tests of the commands, paths, links and messages in the documents."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlcbuild.cli import VERBS, parser
from mlcbuild.errors import InputError
from mlcbuild.recipe import expand, load
from mlcbuild.targets import presets, requirements
from tests.conftest import ROOT
from tests.tour import DOCUMENTS, RESULTS, TOURED, blocks


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
    """Checks that mlcbuild/README.md mentions only functions that exist: each `name` in `path` must be
    defined in that file."""
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


FRONT_WORDS = 1000
"""Maximum number of words in README.md at the top of the checkout, without its tables of results: about two
screens of prose."""


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
