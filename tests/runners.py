"""Simulated CI runners of GitHub and GitLab, which execute every `run:` line of a workflow in order, in a
real shell.

Each runner has a separate home, workspace and store. Expressions are evaluated as far as our workflows use
them. Foreign actions are replaced by their effect on files: checkout copies the project, cache and artifacts
copy directories. Only installing mlcbuild is left out, because it needs a network: the install command is
`true`, and a script `mlcbuild` on the path starts this checkout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fork_client import read_at_start
from tests.forkserver import COMMANDS

Json = Any
SKIPPED = ("actions/setup-python",)


@dataclass
class Runner:
    home: Path
    project: Path
    shared: Path
    """Directory in which the simulated CI service stores artifacts and its cache."""
    variables: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    """Everything that the shells of the simulated CI runner have printed so far, one text for each
    command."""

    @property
    def workspace(self) -> Path:
        return self.home / "work"

    def shell(self, text: str, variables: Mapping[str, str]) -> int:
        binaries = self.home / "bin"
        if not binaries.exists():
            binaries.mkdir(parents=True)
            COMMANDS.write_script(binaries / "mlcbuild", "mlcbuild")
        environment = {
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join(sys.path[1:]),
            "CI": "true",
            **read_at_start(dict(os.environ)),
            **self.variables,
            **variables,
        }
        result = subprocess.run(
            ["bash", "-e", "-c", text],
            cwd=self.workspace,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        self.log.append(result.stdout + result.stderr)
        return result.returncode

    def checkout(self) -> None:
        shutil.rmtree(self.workspace, ignore_errors=True)
        shutil.copytree(self.project, self.workspace)


def value(expression: str, context: Mapping[str, Json]) -> Json:
    """Returns the value of an expression of a GitHub workflow. It supports literals, dotted names,
    fromJSON(...), !x, and one comparison."""
    text = expression.strip()
    if match := re.fullmatch(r"(\S+) (==|!=|>) (.+)", text):
        left, right = value(match[1], context), value(match[3], context)
        if match[2] == ">":
            return left > right
        return (left == right) == (match[2] == "==")
    if match := re.fullmatch(r"fromJSON\((.+)\)", text):
        return json.loads(value(match[1], context))
    if text in ("always()", "!cancelled()"):
        return True
    if re.fullmatch(r"'.*'|[0-9]+", text):
        return text[1:-1] if text[0] == "'" else int(text)
    where: Json = context
    for part in text.split("."):
        where = where.get(part, "")
    return where


def filled(item: Json, context: Mapping[str, Json]) -> Json:
    """Returns a copy of `item`, a part of a CI workflow (text, or a mapping with texts in it), in which
    expressions such as ${{ matrix.os }} are replaced by their values. context: values of the names in
    them."""
    if isinstance(item, dict):
        return {key: filled(inner, context) for key, inner in item.items()}
    if not isinstance(item, str):
        return item
    if (whole := re.fullmatch(r"\$\{\{[^}]*\}\}", item)) is not None:
        return value(whole[0][3:-2], context)
    return re.sub(r"\$\{\{(.*?)\}\}", lambda actual: str(value(actual[1], context)), item)


def run_job(job: Json, runner: Runner, context: dict[str, Json]) -> dict[str, str]:
    """Runs the steps of a job of a CI workflow on a simulated runner, and returns the job's outputs, name ->
    value. After a failed step, only steps with always() are run. context: values for the workflow's
    expressions."""
    files = {name: runner.home / name for name in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_STEP_SUMMARY")}
    for path in files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    context = {**context, "steps": {}, "github": {"workspace": str(runner.workspace), "run_id": "7"}}
    kept = {name: str(path) for name, path in files.items()} | {"GITHUB_ACTIONS": "true"}
    kept["RUNNER_TEMP"] = str(runner.home / "temp")
    (runner.home / "temp").mkdir(exist_ok=True)
    failed = ""
    for step in job["steps"]:
        condition = step.get("if", "")
        if (failed and "always()" not in condition) or not (not condition or filled(condition, context)):
            continue
        if "uses" in step:
            _action(step["uses"], filled(step.get("with", {}), context), runner)
            continue
        lines = [line.partition("=") for line in files["GITHUB_ENV"].read_text().splitlines() if line]
        variables = {**kept, **{name: text for name, _, text in lines}}
        for source in (job.get("env", {}), step.get("env", {})):
            variables |= {key: str(item) for key, item in filled(source, context).items()}
        files["GITHUB_OUTPUT"].write_text("")
        if runner.shell(filled(step["run"], context), variables):
            failed = failed or step["name"]
        output = [line.partition("=") for line in files["GITHUB_OUTPUT"].read_text().splitlines()]
        context["steps"][step.get("id", "")] = {"outputs": {name: text for name, _, text in output}}
    assert not failed, f"{failed}:\n" + "\n".join(runner.log)
    return {name: filled(text, context) for name, text in job.get("outputs", {}).items()}


def _action(name: str, inputs: dict[str, Json], runner: Runner) -> None:
    kind = name.partition("@")[0]
    if kind == "actions/checkout":
        runner.checkout()
    elif kind == "actions/cache/restore":
        _copy(runner.shared / "cache", runner.workspace / inputs["path"])
    elif kind == "actions/cache/save":
        _copy(runner.workspace / inputs["path"], runner.shared / "cache")
    elif kind == "actions/upload-artifact":
        paths = [runner.workspace / line.strip() for line in inputs["path"].splitlines() if line.strip()]
        base = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent
        for path in paths:
            _copy(path, runner.shared / "artifacts" / inputs["name"] / path.relative_to(base))
    elif kind == "actions/download-artifact":
        for path in sorted((runner.shared / "artifacts").glob(inputs["pattern"])):
            _copy(path, runner.workspace / inputs["path"])
    else:
        assert kind in SKIPPED, name


def _copy(source: Path, target: Path) -> None:
    """Copies a directory as CI archives do: empty directories and file modes are lost, and times are the
    present."""
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    for path in files:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        shutil.copyfile(path, place)
