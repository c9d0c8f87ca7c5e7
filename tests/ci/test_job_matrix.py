"""Tests of the job lists for CI systems: labels of runners, shards, and the formats of GitHub and GitLab."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import cast

import pytest
import yaml

from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.build.plan import Plan
from mlcbuild.ci.job_matrix import ANY, CiJob, Command, github, gitlab, labels, reasons, runner, shards
from mlcbuild.errors import UsageError
from mlcbuild.pipeline import Product
from mlcbuild.targets.target import Target

LINUX = Target("mine", "x86_64-unknown-linux-gnu", "x86-64-v3")
JOB = CiJob("a-b-c", "ubuntu-latest", "k", "new", "recipe.yaml --only a-b-c")


def test_labels_are_pairs_for_targets_that_exist() -> None:
    assert labels(["mine=big", "*=small", "mine=x=y"], ["mine"]) == {"mine": "x=y", "*": "small"}
    with pytest.raises(UsageError) as caught:
        labels(["mine", "=x", "mine=", "mien=x"], ["mine"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert all(line.endswith(": write --label target=runner") for line in lines[:3])
    assert "no variant is for 'mien'; did you mean 'mine'?" in lines[3]


@pytest.mark.parametrize(
    ("triple", "label"),
    [
        ("x86_64-unknown-linux-gnu", "ubuntu-latest"),
        ("aarch64-unknown-linux-gnu", "ubuntu-24.04-arm"),
        ("arm64-apple-macos", "macos-latest"),
        ("riscv64-unknown-linux-gnu", "ubuntu-latest"),
    ],
)
def test_a_target_has_a_usual_runner(triple: str, label: str) -> None:
    target = Target("mine", triple, "generic")
    assert runner(target, {}) == label
    assert runner(target, {ANY: "own"}) == "own"
    assert runner(target, {ANY: "own", "mine": "big", "other": "x"}) == "big"


def test_arguments_are_quoted_for_a_shell() -> None:
    command = Command("my recipe.yaml", ("a=b c",), allow_outside=True)
    assert command.arguments("--only", "x") == "'my recipe.yaml' --set 'a=b c' --allow-outside --only x"
    assert Command("r.yaml").arguments() == "r.yaml"


def products(count: int) -> list[Product]:
    return [
        cast(Product, SimpleNamespace(variant=SimpleNamespace(name=f"v{number}"))) for number in range(count)
    ]


def test_shards_are_at_most_as_many_as_variants() -> None:
    jobs = shards(products(2), 5, {ANY: "own"}, Command("r.yaml"))
    assert [job.name for job in jobs] == ["shard 1 of 2", "shard 2 of 2"]
    assert jobs[1].arguments == "r.yaml --shard 2/2 --only v0 --only v1"
    assert {job.runner for job in jobs} == {"own"} and {job.key for job in jobs} == {None}
    assert shards([], 3, {}, Command("r.yaml")) == []
    assert len(shards(products(5), 3, {}, Command("r.yaml"))) == 3


def test_a_step_that_waits_has_the_reason_of_the_first_one_that_runs() -> None:
    def step(name: str, *needs: str) -> Step:
        inputs = {f"in{i}": Input(need) for i, need in enumerate(needs)}
        return Step(name, "tests.actions:text", {"text": name}, inputs)

    graph = Graph([step("a"), step("b", "a"), step("c", "b"), step("d")])
    states = {"a": ("run", "new"), "b": ("pending", ""), "c": ("pending", ""), "d": ("hit", "")}
    planned = [
        SimpleNamespace(name=name, state=state, reason=reason) for name, (state, reason) in states.items()
    ]
    actual = reasons(graph, cast(Plan, SimpleNamespace(steps=planned)))
    assert actual == dict.fromkeys("abc", "a: new")


def test_github_reads_one_line_of_json() -> None:
    text = github([JOB])
    assert "\n" not in text
    assert json.loads(text)["include"][0] == {
        "name": "a-b-c",
        "runner": "ubuntu-latest",
        "key": "k",
        "reason": "new",
        "arguments": "recipe.yaml --only a-b-c",
    }


def test_gitlab_gets_a_job_for_each_variant_and_at_least_one() -> None:
    document = yaml.safe_load(gitlab([JOB]))
    assert document["stages"] == ["build"] and set(document) == {"stages", "a-b-c"}
    job = document["a-b-c"]
    assert job["tags"] == ["ubuntu-latest"] and job["artifacts"]["reports"] == {"junit": "junit.xml"}
    assert job["script"][0].startswith("mlcbuild run recipe.yaml --only a-b-c --keep-going ")
    empty = yaml.safe_load(gitlab([]))
    assert empty["nothing to build"]["script"] == ["echo every variant is up to date"]
