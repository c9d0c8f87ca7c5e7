"""Tests of the files and texts in which a run reports its result: log, JUnit, Markdown, GitHub
annotations."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcbuild.ci.ci_reports import junit, markdown
from mlcbuild.cli.annotations import annotation
from mlcbuild.errors import Problem
from mlcbuild.reports import runlog
from mlcbuild.reports.runlog import LoggedStep, LoggedVariant, RunLog
from mlcbuild.store.store import Store
from tests.conftest import QUICKSTART, checked, mlcbuild, project

FIGURES = {"kl_mean": 0.0123, "kl_max": 1.5, "top1_agreement": 0.95, "perplexity": 12.5}
LOG = RunLog(
    "shop",
    "recipe.yaml",
    1_700_000_000.0,
    12.5,
    "box",
    (
        LoggedStep("config/a", ("fetch/a",), "0" * 64, "reused", "", None, 0.0, 942),
        LoggedStep("weights/a/q4", ("config/a",), "1" * 64, "built", "never built", 0.1, 4.25, 4_200_000),
        LoggedStep(
            "library/x", ("config/a",), "2" * 64, "failed", "LLVM said <no>", 0.2, 8.0, None, "one\n``` two"
        ),
        LoggedStep("bundle/a|b", ("library/x",), None, "skipped", "needs library/x", None, 0.0, None),
    ),
    (
        LoggedVariant("a-q4-host", "a", "q4", "host", "built", "", 3, 9, 9_000_000, 4_200_000, FIGURES),
        LoggedVariant("a|b", "a", "b", "host", "failed", "LLVM\nsaid <no>", 3, 9, None, None),
    ),
)


def test_junit_has_a_case_for_each_step_and_variant() -> None:
    root = ElementTree.fromstring(junit(LOG))
    assert root.get("time") == "12.500"
    steps, variants = root.findall("testsuite")
    assert [case.get("name") for case in steps] == [step.name for step in LOG.steps]
    assert [case.get("name") for case in variants] == ["a-q4-host", "a|b"]
    assert {key: steps.get(key) for key in ("tests", "failures", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "skipped": "1",
    }
    failure = steps[2].find("failure")
    assert failure is not None
    assert failure.get("message") == "LLVM said <no>"
    assert failure.text == "one\n``` two"
    assert steps[1].get("time") == "4.250"
    skipped = steps[3].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "needs library/x"


@settings(deadline=None)
@given(st.text())
def test_junit_is_xml_whatever_was_said(text: str) -> None:
    step = replace(LOG.steps[2], name=text, words=text, tail=text)
    assert (
        len(ElementTree.fromstring(junit(replace(LOG, recipe=text, steps=(step,))).encode()).findall("*"))
        == 2
    )


def test_the_summary_says_what_happened() -> None:
    lines = markdown(LOG).splitlines()
    assert lines[0] == "## mlcbuild: shop"
    assert lines[2] == "1 built, 1 reused, 1 failed, 1 skipped in 12.5 s."
    (row,) = [line for line in lines if line.startswith("| a-q4-host ")]
    assert row == "| a-q4-host | built | 9.0 MB | 4.2 MB | 0.0123 | 1.5 | 95.0% | 12.5 |"
    (row,) = [line for line in lines if line.startswith(r"| a\|b ")]
    assert row.startswith(r"| a\|b | failed: LLVM said &lt;no> |")
    assert "````" in lines, "a fence that the log's own does not close"
    assert "| weights/a/q4 | 4.2 s | 4.2 MB | never built |" in lines
    assert "Interrupted by SIGINT: 1 built" in markdown(replace(LOG, interrupted="SIGINT"))
    assert markdown(replace(LOG, shard="1/3")).startswith("## mlcbuild: shop, shard 1/3\n")


def test_annotations_escape_what_github_would_read() -> None:
    problem = Problem("/w/a, b:c/r.yaml", 3, 9, "50% wrong\nand \x1bmore: ,")
    assert annotation(problem, Path("/w")) == (
        "::error file=a%2C b%3Ac/r.yaml,line=3,col=9::50%25 wrong%0Aand \\x1bmore: ,"
    )
    assert annotation(Problem("/x/r.yaml", 0, 0, "gone"), Path("/w")) == "::error file=/x/r.yaml::gone"


def test_logs_are_kept_and_bounded(tmp_path: Path) -> None:
    store, recipe = Store(tmp_path / "store"), tmp_path / "recipe.yaml"
    assert runlog.latest(store, recipe) == []
    for n in range(runlog.KEPT + 5):
        runlog.save(store, recipe, replace(LOG, time=LOG.time + n))
    actual = runlog.latest(store, recipe)
    assert len(actual) == runlog.KEPT
    assert actual[0] == replace(LOG, time=LOG.time + runlog.KEPT + 4)
    assert runlog.latest(store, tmp_path / "other.yaml") == []
    (first, *others) = sorted((store.root / "runs").rglob("*.json"))
    first.write_text("{}")
    others[0].write_text(json.dumps({"format": "mlcbuild-run/2"}))
    assert len(runlog.latest(store, recipe)) == runlog.KEPT - 2, "what cannot be read is left out"


def test_a_recipe_has_one_log_by_all_of_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    runlog.save(store, Path("../recipe.yaml"), LOG)
    monkeypatch.chdir(tmp_path)
    assert (
        runlog.latest(store, Path("recipe.yaml")) == runlog.latest(store, tmp_path / "recipe.yaml") == [LOG]
    )


def test_a_store_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    store = Store(tmp_path / "store")
    runlog.save(store, tmp_path / "r.yaml", LOG)
    assert runlog.latest(store, tmp_path / "r.yaml") == []


def test_a_file_in_place_of_the_logs_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    runlog.save(Store(tmp_path), tmp_path / "r.yaml", LOG)
    assert runlog.latest(Store(tmp_path), tmp_path / "r.yaml") == [LOG]


@pytest.fixture
def recipe(tmp_path: Path, tiny_bundles: Path) -> Path:
    """Returns the path of a recipe with two variants: the weights of one lose more accuracy than the recipe
    allows, and those of the other are exact."""
    text = QUICKSTART.replace("max_kl: 0.1", "max_kl: 0.000001").replace(", q4a8_1", "")
    path = project(tmp_path / "project", text)
    shutil.copy(tiny_bundles / "prompts.txt", path.parent)
    return path


def test_a_run_in_github_actions(recipe: Path, common_store: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n")
    report, summary = tmp_path / "junit.xml", tmp_path / "summary.md"
    result = mlcbuild(
        *("run", recipe, "--keep-going", "--json", "--junit", report, "--summary", summary),
        store=common_store,
        variables={
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(page),
            "GITHUB_WORKSPACE": str(recipe.parent),
        },
    )
    assert result.returncode == 1
    json.loads(result.stdout)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("::error ")]
    assert line.startswith("::error file=recipe.yaml,line=3,col=16::variant 'tiny-q4f16_1-host' failed: ")
    assert "the mean KL divergence is" in line
    assert page.read_text() == "before\n" + summary.read_text() + "\n"
    cases = ElementTree.fromstring(report.read_bytes()).iter("testcase")
    failed = {case.get("name") for case in cases if case.find("failure") is not None}
    assert failed == {"verify/tiny-q4f16_1-host", "tiny-q4f16_1-host"}
    exact = next(line for line in summary.read_text().splitlines() if line.startswith("| tiny-q0f32-host"))
    manifest = json.loads((recipe.parent / "dist" / "tiny-q0f32-host" / "bundle.json").read_bytes())
    assert f"{manifest['verification']['kl_mean']:.3g}" in exact
    (log, *_) = runlog.latest(Store(common_store), recipe)
    assert {item.name: item.status for item in log.variants} == {
        "tiny-q0f32-host": "built",
        "tiny-q4f16_1-host": "failed",
    }
    verify = next(step for step in log.steps if step.name == "verify/tiny-q4f16_1-host")
    assert verify.start is not None
    assert verify.start + verify.seconds <= log.seconds + 0.1


def test_problems_of_a_recipe_are_annotated(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("version: 1\nmodels: {a: ./nowhere}\nquantizations: [q4f61]\ntargets: [host]\n")
    here = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path)}
    result = mlcbuild("validate", path, store=tmp_path / "s", variables=here)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("::error ")]
    assert [line.partition("::")[2].partition("::")[0] for line in lines] == [
        "error file=recipe.yaml,line=2,col=13",
        "error file=recipe.yaml,line=3,col=17",
    ]
    assert "::error" not in mlcbuild("validate", path, store=tmp_path / "s").stderr


@pytest.mark.parametrize("option", ["--junit", "--summary"])
def test_outputs_that_cannot_be_written_are_told_first(recipe: Path, tmp_path: Path, option: str) -> None:
    result = mlcbuild("run", recipe, option, tmp_path / "no" / "x", store=tmp_path / "s")
    assert result.returncode == 2
    assert result.stderr == f"{tmp_path / 'no' / 'x'}: cannot be written: No such file or directory\n"
    assert not (tmp_path / "s").exists()


def test_a_plain_run_writes_no_more_than_its_log(tiny_bundles: Path, common_store: Path) -> None:
    before = set(tiny_bundles.iterdir())
    checked(mlcbuild("run", "recipe.yaml", store=common_store, cwd=tiny_bundles))
    assert set(tiny_bundles.iterdir()) == before
    (log, *_) = runlog.latest(Store(common_store), tiny_bundles / "recipe.yaml")
    assert {step.status for step in log.steps} == {"reused"}
    assert all(variant.figures["tokens"] > 0 for variant in log.variants)
    assert log.steps[0].needs == ("fetch/tiny",)
