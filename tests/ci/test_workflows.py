"""Tests that execute the CI workflow files: their shell lines run in order on two simulated runners."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ci.test_ci import forget
from tests.conftest import QUICKSTART, ROOT, copy_store, project
from tests.runners import Runner, filled, run_job

WORKFLOW = yaml.safe_load((ROOT / "ci" / "github-workflow.yml").read_text())
TRIGGERS = WORKFLOW[True]
"""The section `on` of the GitHub workflow, which states its triggers. YAML 1.1 reads the key `on` as True."""


@pytest.fixture
def runners(tmp_path: Path, tiny_bundles: Path, common_store: Path) -> tuple[Runner, Runner]:
    """Returns two simulated runners of one CI service, whose cache has the libraries of an earlier commit but
    no weights, bundles or logits."""
    recipe = project(tmp_path / "project", QUICKSTART.replace("q0f32, ", ""))
    shutil.copy(tiny_bundles / "prompts.txt", recipe.parent)
    shared = tmp_path / "service"
    copy_store(common_store, shared / "cache", "runs", "logs")
    forget(shared / "cache", "(weights|bundle|verify|reference)/.*")
    first, second = (Runner(tmp_path / name, recipe.parent, shared) for name in "ab")
    return first, second


def inputs(**values: object) -> dict[str, Any]:
    defaults = {name: item.get("default") for name, item in TRIGGERS["workflow_call"]["inputs"].items()}
    return {**defaults, "recipe": "recipe.yaml", "install": "true", **values}


def run_workflow(runners: tuple[Runner, Runner], **values: object) -> list[dict[str, Any]]:
    """Runs the GitHub workflow, distributing the jobs of its matrix over two runners in turn, and returns the
    matrix entries."""
    jobs, context = WORKFLOW["jobs"], {"inputs": inputs(**values), "secrets": {"environment": ""}}
    context["needs"] = {"plan": {"outputs": run_job(jobs["plan"], runners[0], context)}}
    entries: list[dict[str, Any]] = []
    if filled(jobs["build"]["if"], context):
        entries = filled(jobs["build"]["strategy"]["matrix"], context)["include"]
    for index, entry in enumerate(entries):
        here = {**context, "matrix": entry, "strategy": {"job-index": index}}
        assert filled(jobs["build"]["runs-on"], here) == "ubuntu-latest"
        run_job(jobs["build"], runners[index % 2], here)
    run_job(jobs["finish"], runners[0], context)
    return entries


def test_a_job_for_each_variant_and_nothing_the_next_time(runners: tuple[Runner, Runner]) -> None:
    entries = run_workflow(runners)
    assert [entry["name"] for entry in entries] == ["tiny-q4f16_1-host", "tiny-q4a8_1-host"]
    artifacts = runners[0].shared / "artifacts"
    for index, entry in enumerate(entries):
        manifest = artifacts / f"bundles-{index}" / "dist" / entry["name"] / "bundle.json"
        assert json.loads(manifest.read_bytes())["verification"]["kl_mean"] > 0
        assert "<testcase" in (artifacts / f"junit-{index}" / "junit.xml").read_text()
    assert run_workflow(runners) == [], "the cache has everything"


def test_shards_share_the_work_and_the_last_job_has_all_bundles(runners: tuple[Runner, Runner]) -> None:
    entries = run_workflow(runners, shards=2)
    assert [entry["name"] for entry in entries] == ["shard 1 of 2", "shard 2 of 2"]
    last = next(text for text in reversed(runners[0].log) if " built, " in text and "bundles in dist" in text)
    assert last.splitlines()[-1].startswith("0 built, "), last
    bundles = runners[0].shared / "artifacts" / "bundles"
    assert sorted(path.name for path in (bundles / "dist").glob("tiny-*")) == [
        "tiny-q4a8_1-host",
        "tiny-q4f16_1-host",
    ]
    assert "Loss against size" in (bundles / "report.html").read_text()


def test_a_failing_build_fails_its_job_and_keeps_what_it_has(runners: tuple[Runner, Runner]) -> None:
    recipe = runners[0].project / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_kl: 0.1", "max_kl: 0.000001").replace("q4f16_1, ", ""))
    with pytest.raises(AssertionError, match="::error file="):
        run_workflow(runners)
    artifacts = runners[0].shared / "artifacts"
    assert "<failure" in (artifacts / "junit-0" / "junit.xml").read_text()
    assert (artifacts / "mlcbuild-results-0" / ".mlcbuild-results-0.tar").is_file()


def test_the_last_job_needs_a_plan() -> None:
    """Checks that the job which builds what others left does not build everything after a failed plan."""
    for name in ("ci/github-workflow.yml", ".github/workflows/mlcbuild.yml"):
        finish = yaml.safe_load((ROOT / name).read_text())["jobs"]["finish"]
        assert finish["if"] == "${{ !cancelled() && needs.plan.result == 'success' }}"


def test_a_job_passes_on_only_new_results(tmp_path: Path) -> None:
    steps = {step.get("name"): step for job in WORKFLOW["jobs"].values() for step in job["steps"]}
    runner = Runner(tmp_path / "a", tmp_path / "project", tmp_path / "service")
    store = runner.workspace / ".mlcbuild"
    for name in ("ac/0a/0a1", "cas/0b/0b1", "store.json", "logs/old"):
        write(store / name, "restored")
    temporary = tmp_path / "temp"
    temporary.mkdir()
    variables = {"RUNNER_TEMP": str(temporary), "JOB": "3"}
    assert runner.shell(steps["List what was restored"]["run"], variables) == 0, runner.log
    for name in ("ac/0a/0a2", "cas/0c/0c1", "logs/new"):
        write(store / name, "new")
    assert runner.shell(steps["Pack new results"]["run"], variables) == 0, runner.log
    packed = runner.workspace / ".mlcbuild-results-3.tar"
    assert packed_names(packed) == ["ac/0a/0a2", "cas/0c/0c1"]

    last = Runner(tmp_path / "b", tmp_path / "project", tmp_path / "service")
    write(last.workspace / ".mlcbuild" / "ac" / "0a" / "0a1", "restored")
    unpack = steps["Unpack new results"]["run"]
    assert last.shell(unpack, {}) == 0, "no job has uploaded anything"
    place = last.workspace / ".mlcbuild-results" / packed.name
    place.parent.mkdir()
    shutil.copy(packed, place)
    assert last.shell(unpack, {}) == 0, last.log
    assert (last.workspace / ".mlcbuild" / "cas" / "0c" / "0c1").read_text() == "new"
    assert not place.exists(), "results would lie on the disk twice"


def packed_names(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        return sorted(archive.getnames())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_job_on_an_empty_store_passes_on_everything(tmp_path: Path) -> None:
    steps = {step.get("name"): step for step in WORKFLOW["jobs"]["build"]["steps"]}
    runner = Runner(tmp_path / "a", tmp_path / "project", tmp_path / "service")
    runner.workspace.mkdir(parents=True)
    variables = {"RUNNER_TEMP": str(tmp_path), "JOB": "0"}
    assert runner.shell(steps["List what was restored"]["run"], variables) == 0, runner.log
    write(runner.workspace / ".mlcbuild" / "ac" / "0a" / "0a1", "new")
    assert runner.shell(steps["Pack new results"]["run"], variables) == 0, runner.log
    assert packed_names(runner.workspace / ".mlcbuild-results-0.tar") == ["ac/0a/0a1"]


def test_the_gitlab_template(runners: tuple[Runner, Runner]) -> None:
    """Checks the GitLab template: its jobs and those of the child pipeline that it generates run in order,
    and pass results through a shared store."""
    template = yaml.safe_load((ROOT / "ci" / "gitlab-template.yml").read_text())
    settings = {
        **template["variables"],
        "MLCBUILD_INSTALL": "true",
        "MLCBUILD_MATRIX": "--label *=ours",
        "MLCBUILD_STORE": str(runners[0].shared / "cache"),
    }
    runners[0].checkout()
    script = "\n".join(template["mlcbuild-plan"]["script"])
    assert runners[0].shell(script, settings) == 0, runners[0].log
    (created,) = template["mlcbuild-plan"]["artifacts"]["paths"]
    child = yaml.safe_load((runners[0].workspace / created).read_text())
    trigger = template["mlcbuild-build"]["trigger"]["include"][0]
    assert (trigger["artifact"], trigger["job"]) == (created, "mlcbuild-plan")
    jobs = {name: job for name, job in child.items() if name != "stages"}
    assert list(jobs) == ["tiny-q4f16_1-host", "tiny-q4a8_1-host"]
    for runner, job in zip(runners, jobs.values(), strict=True):
        assert job["tags"] == ["ours"]
        runner.checkout()
        script = "\n".join([*job["before_script"], *job["script"]])
        assert runner.shell(script, settings) == 0, runner.log
        for path in (*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]):
            assert (runner.workspace / path.replace("$MLCBUILD_ARTIFACTS", "dist")).exists(), path
    assert runners[0].shell("\n".join(template["mlcbuild-plan"]["script"]), settings) == 0
    assert "nothing to build" in yaml.safe_load((runners[0].workspace / created).read_text())


def test_workflows_name_actions_by_commit() -> None:
    """Checks that workflows name foreign actions by commit hash: a tag could be moved to other code, which
    would see the secrets of everybody who copied the workflow."""
    files = [ROOT / "ci" / "github-workflow.yml", *(ROOT / ".github" / "workflows").glob("*.yml")]
    uses = [line for file in files for line in re.findall(r"uses: +(.*)", file.read_text())]
    foreign = [line for line in uses if not line.startswith("./")]
    assert len(foreign) >= 15
    assert [line for line in foreign if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_our_own_workflows_call_what_is_there() -> None:
    place = ROOT / ".github" / "workflows"
    assert (place / "mlcbuild.yml").read_bytes() == (ROOT / "ci" / "github-workflow.yml").read_bytes()
    jobs = yaml.safe_load((place / "ci.yml").read_text())["jobs"]
    assert jobs["test"]["steps"][-1]["run"] == "ci/test"
    assert (ROOT / jobs["test"]["steps"][-1]["run"]).is_file()
    quickstart = jobs["quickstart"]
    assert quickstart["uses"] == "./.github/workflows/mlcbuild.yml"
    assert set(quickstart["with"]) <= set(TRIGGERS["workflow_call"]["inputs"])
    assert (ROOT / quickstart["with"]["recipe"]).is_file()


def test_templates_assume_no_package_of_an_index() -> None:
    """Checks that the templates for GitHub and GitLab CI require the command that installs mlcbuild and have
    no default for it: whoever registered a default package name on an index could run code on the runners."""
    assert TRIGGERS["workflow_call"]["inputs"]["install"]["required"]
    template = yaml.safe_load((ROOT / "ci" / "gitlab-template.yml").read_text())
    result = subprocess.run(
        ["bash", "-e", "-c", template["mlcbuild-plan"]["script"][0]],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0 and "set it to the command that installs mlcbuild" in result.stderr


def test_user_text_reaches_shells_only_through_variables() -> None:
    """Checks that no shell line of a workflow contains a `${{...}}` expression, whose text the shell would
    execute."""
    for job in WORKFLOW["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")
