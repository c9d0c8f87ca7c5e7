"""Generates jobs for CI systems: one for each variant of a recipe that needs work, or one for each shard."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from mlcbuild.build.graph import Graph
from mlcbuild.build.plan import Plan
from mlcbuild.errors import UsageError, did_you_mean
from mlcbuild.pipeline import Pipeline, Product
from mlcbuild.targets.target import Target

LABELS: Mapping[tuple[str, str], str] = {
    ("linux", "x86_64"): "ubuntu-latest",
    ("linux", "aarch64"): "ubuntu-24.04-arm",
    ("macos", "arm64"): "macos-latest",
    ("windows", "x86_64"): "ubuntu-latest",
}
"""(system, architecture) of a target -> label of a hosted CI runner that can run, and so verify, its bundles.

Targets that no hosted runner can run are compiled on the runner OTHER.
"""
OTHER = "ubuntu-latest"
DONE = ("hit", "remote")
"""States of planned build steps without work: the result is in the store ("hit") or in a remote cache
("remote").
"""
ANY = "*"


@dataclass(frozen=True)
class CiJob:
    """One job of a CI system, which builds one variant of a recipe, or one shard (a share of the whole
    build).
    """

    name: str
    runner: str
    """Label of the machine that runs the job: `runs-on` on GitHub, a tag on GitLab."""
    key: str | None
    """Cache key of the last build step of the variant that the CI job builds; None while an input of this
    step is not built, and for a job that builds a shard.
    """
    reason: str
    """The reason why the CI job has work to do; "" if it has none, and for a job that builds a shard."""
    arguments: str
    """Arguments with which the CI job calls `mlcbuild run`, quoted for a shell."""


@dataclass(frozen=True)
class Command:
    """The parts of the command line that all jobs of a CI matrix share."""

    recipe: str
    settings: tuple[str, ...] = ()
    """The `--set` options of the command line, each as the text NAME=VALUE, which override variables of the
    recipe."""
    allow_outside: bool = False

    def arguments(self, *more: str) -> str:
        words = [self.recipe, *(word for pair in self.settings for word in ("--set", pair))]
        words += ["--allow-outside"] if self.allow_outside else []
        return shlex.join([*words, *more])


@dataclass(frozen=True)
class Matrix:
    """The options of the command `mlcbuild matrix`."""

    command: Command
    """The parts of the command line that all generated CI jobs share."""
    shards: int | None = None
    """Maximum number of CI jobs (shards of the build) that share all work, but at most one for each variant
    that needs work or, with `all`, for each variant. None: one job for each of these variants."""
    labels: tuple[str, ...] = ()
    """Texts TARGET=RUNNER, each with the name of a recipe's target and the label of the CI runner for it; the
    target * stands for all targets."""
    all: bool = False
    """True if the generated CI jobs include those of the recipe's variants (combinations of model,
    quantization and target) whose bundles are already built.
    """


def labels(pairs: Iterable[str], targets: Iterable[str]) -> dict[str, str]:
    """Parses `--label target=runner` options into target -> label of a CI runner; the target may be `*`,
    which stands for all targets. Of several options for one target the last counts.

    targets: names of the targets that a recipe uses. Raises one UsageError with all problems: options of
    another form, and targets that are not among these.
    """
    labels_by_target, problems, names = {}, [], [*targets, ANY]
    for pair in pairs:
        target, equals, runner = pair.partition("=")
        if not equals or not target or not runner:
            problems.append(f"--label {pair}: write --label target=runner")
        elif target not in names:
            problems.append(f"--label {pair}: no variant is for '{target}'; {did_you_mean(target, names)}")
        labels_by_target[target] = runner
    if problems:
        raise UsageError("\n".join(problems))
    return labels_by_target


def runner(target: Target, labels: Mapping[str, str]) -> str:
    """Returns the label of the CI runner for a target: the entry of `labels` for the target or for all
    targets, `*`, else that of a hosted runner with the target's system and architecture or, if there is none,
    of a hosted Linux runner."""
    usual = LABELS.get((target.system, target.architecture), OTHER)
    return labels.get(target.name) or labels.get(ANY) or usual


def reasons(graph: Graph, plan: Plan) -> dict[str, str]:
    """Returns name of a build step -> reason, in the form "NAME: REASON", for each step that needs work. A
    step whose inputs are not built yet gets the text of the first of its direct dependencies that needs work;
    NAME is then the dependency that must run first."""
    reasons: dict[str, str] = {}
    for planned in plan.steps:
        if planned.state == "run":
            reasons[planned.name] = f"{planned.name}: {planned.reason}"
        elif planned.state not in DONE:
            waits = (need for need in graph.needs(graph.step(planned.name)) if need in reasons)
            reasons[planned.name] = reasons[next(waits)]
    return reasons


def jobs(products: Sequence[Product], pipeline: Pipeline, plan: Plan, matrix: Matrix) -> list[CiJob]:
    """Returns CI jobs: one for each of the variants `products` that needs work (with `matrix.all`, for each
    variant) or, with `matrix.shards`, at most that number of jobs which share the work of these variants.
    Raises UsageError if the number of shards is below 1, or for a wrong runner label in `matrix`."""
    if matrix.shards is not None and matrix.shards < 1:
        raise UsageError(f"--shards {matrix.shards}: there must be at least one")
    names = dict.fromkeys(item.variant.target.name for item in pipeline.products)
    runners = labels(matrix.labels, names)
    rows = list(zip(products, variants(products, pipeline, plan, runners, matrix.command), strict=True))
    chosen = [(product, job) for product, job in rows if job.reason or matrix.all]
    if matrix.shards is None:
        return [job for _, job in chosen]
    return shards([product for product, _ in chosen], matrix.shards, runners, matrix.command)


def variants(
    products: Iterable[Product], pipeline: Pipeline, plan: Plan, labels: Mapping[str, str], command: Command
) -> list[CiJob]:
    """Returns a CI job for each of the variants `products` of a recipe, including those that need no work.
    labels: name of a target, or `*` for all targets -> label of the CI runner."""
    why = reasons(pipeline.graph, plan)
    jobs = []
    for product in products:
        planned = plan[pipeline.graph.resolve(product.last)]
        name, target = product.variant.name, product.variant.target
        arguments = command.arguments("--only", name)
        jobs.append(CiJob(name, runner(target, labels), planned.key, why.get(planned.name, ""), arguments))
    return jobs


def shards(
    products: Sequence[Product], count: int, labels: Mapping[str, str], command: Command
) -> list[CiJob]:
    """Returns CI jobs that share the work of building the variants `products` of a recipe: `count` jobs, but
    at most one for each variant. They run on the CI runner that `labels` states for all targets, `*`, or else
    on a hosted Linux runner; labels of single targets are ignored."""
    count = min(count, len(products))
    only = [word for product in products for word in ("--only", product.variant.name)]
    label = labels.get(ANY, OTHER)
    return [
        CiJob(f"shard {i} of {count}", label, None, "", command.arguments("--shard", f"{i}/{count}", *only))
        for i in range(1, count + 1)
    ]


def github(jobs: Iterable[CiJob]) -> str:
    """Returns CI jobs as one line of JSON, an object with the list of jobs under "include". A GitHub workflow
    appends it to $GITHUB_OUTPUT as NAME=JSON, and reads it with fromJSON as its `matrix`."""
    return json.dumps({"include": [asdict(job) for job in jobs]}, ensure_ascii=False)


def gitlab(jobs: Sequence[CiJob]) -> str:
    """Returns CI jobs as the text of a GitLab child pipeline in JSON, which is valid YAML. A pipeline must
    have a job, so without work it has one that only reports that everything is up to date.
    """
    pipeline: dict[str, object] = {"stages": ["build"]}
    for job in jobs:
        pipeline[job.name] = {
            "stage": "build",
            "tags": [job.runner],
            "before_script": [_INSTALL],
            "script": [f"mlcbuild run {job.arguments} --keep-going --junit junit.xml --summary summary.md"],
            "artifacts": {
                "when": "always",
                "paths": ["summary.md", "$MLCBUILD_ARTIFACTS"],
                "reports": {"junit": "junit.xml"},
            },
        }
    if not jobs:
        pipeline["nothing to build"] = {"stage": "build", "script": ["echo every variant is up to date"]}
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in pipeline.items()]
    return "\n".join(lines)


_INSTALL = 'eval "${MLCBUILD_INSTALL:-}"'
"""Shell command that installs mlcbuild on a CI runner: it executes the text of $MLCBUILD_INSTALL, which the
user sets for GitLab's pipeline template; without this variable it does nothing."""
