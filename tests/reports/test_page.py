"""Tests of the report page of a run."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mlcbuild.reports import page
from tests.conftest import QUICKSTART, checked, mlcbuild, project
from tests.reports.test_runlog import LOG


class Tags(HTMLParser):
    """An HTML parser that checks that tags are closed in order, and collects the text."""

    VOID = frozenset({"meta", "br", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & {*self.open}:
            self.text.append(data)


def read(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == []
    assert not re.search(r"(?:src|href)=|url\(|@import", text), "it needs no other file"
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    return tags


def test_a_page_shows_a_run_and_needs_nothing_else() -> None:
    text = " ".join(read(page.html(LOG, None)).text)
    for words in ("What failed", "LLVM said <no>", "a-q4-host", "4.2 MB", "Loss against size", "50%"):
        assert words in text, words
    assert "Since the run" not in text


def test_names_are_no_markup() -> None:
    nasty = "</title><script>alert(1)</script>&"
    log = replace(
        LOG,
        recipe=nasty,
        steps=tuple(replace(step, name=step.name + nasty, words=nasty, tail=nasty) for step in LOG.steps),
        variants=tuple(
            replace(v, name=nasty, quantization=nasty, model=nasty, words=nasty) for v in LOG.variants
        ),
    )
    text = page.html(log, LOG)
    read(text)
    assert text.count("<script") == 1 and "<script>alert" not in text, "the one of the drawing"


def test_what_changed_since_the_last_run() -> None:
    steps = (
        replace(LOG.steps[1], key="9" * 64, words="scheme q4: group_size 32 -> 64"),
        replace(LOG.steps[1], name="weights/a/new", words="never built"),
        *LOG.steps[2:],
    )
    worse = replace(LOG.variants[0], bytes=9_900_000, figures={**LOG.variants[0].figures, "kl_mean": 0.0246})
    text = " ".join(read(page.html(replace(LOG, steps=steps, variants=(worse,)), LOG)).text)
    assert "Since the run of 2023-11-14 22:13:20 UTC" in text
    for words in (
        "group_size 32 -> 64",
        "weights/a/new",
        "is new",
        "config/a",
        "is gone",
        "+10.0%",
        "+100.0%",
    ):
        assert words in text, words
    assert "No step has changed" in page.html(LOG, LOG)


def test_a_large_run_has_a_page_without_the_drawing() -> None:
    many = tuple(replace(LOG.steps[1], name=f"weights/{i}", start=i / 10) for i in range(3000))
    text = page.html(replace(LOG, steps=many), LOG)
    assert "Steps and what they need" not in text
    assert "and 2500 more" in text


def test_a_page_stays_of_a_size_that_opens() -> None:
    steps = tuple(
        replace(LOG.steps[1], name=f"weights/{i}/a-name-of-usual-length", start=i / 10) for i in range(48_600)
    )
    variants = tuple(
        replace(LOG.variants[0], name=f"{i}", model=f"m{i // 96}", target=f"t{i % 12}", status="reused")
        for i in range(19_200)
    )
    failed = replace(LOG.variants[1], name="the-one-that-failed")
    text = page.html(replace(LOG, steps=steps, variants=(*variants, failed)), LOG)
    assert len(text) < 3_000_000
    for words in ("the-one-that-failed", "and 18701 more", "and 170 more", "1500 longest of 48600 steps"):
        assert words in text, words


def test_the_report_of_real_runs(tmp_path: Path, tiny_bundles: Path, common_store: Path) -> None:
    recipe = project(tmp_path, QUICKSTART.replace("q0f32, ", ""))
    shutil.copy(tiny_bundles / "prompts.txt", tmp_path)
    result = mlcbuild("report", recipe, store=common_store, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{recipe}: the store at {common_store} has no run of it to report; run ")
    checked(mlcbuild("run", recipe, store=common_store))
    recipe.write_text(recipe.read_text().replace("q4f16_1", "q0f32"))
    checked(mlcbuild("run", recipe, "--force", "config/*", store=common_store))
    recipe.write_text("no recipe any more")
    words = checked(mlcbuild("report", recipe, "-o", "page.html", store=common_store, cwd=tmp_path))
    assert re.fullmatch(r"page.html: 1 built, \d+ reused in .* s\n", words)
    text = " ".join(read((tmp_path / "page.html").read_text()).text)
    assert "verify/tiny-q4f16_1-host" in text, "gone since the run before"
    assert "Since the run of" in text
    result = mlcbuild("report", recipe, "-o", tmp_path / "no" / "p.html", store=common_store)
    assert result.returncode == 2
    assert "no/p.html: cannot be written: No such file or directory" in result.stderr


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_without_work_has_a_page(steps: int) -> None:
    read(page.html(replace(LOG, steps=LOG.steps[:steps], variants=()), None))
