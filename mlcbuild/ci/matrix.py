"""Jobs: one for each variant that needs work, or one for each shard, as CI systems take them."""

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
"""(system, architecture) of a target -> the runner whose machine can run, and so verify, it. What no hosted
runner can run is compiled on OTHER."""
OTHER = "ubuntu-latest"
DONE = ("hit", "remote")
"""States of a step whose result needs no work."""
ANY = "*"


@dataclass(frozen=True)
class Job:
    name: str
    runner: str
    """Label of the machine: `runs-on` of GitHub, a tag of GitLab."""
    key: str | None
    """Of the variant's last step; None while an input of it is not built, and for a shard."""
    reason: str
    """Why there is work, "" if there is none."""
    arguments: str
    """What follows `mlcbuild run`, quoted for a shell."""


@dataclass(frozen=True)
class Command:
    """What every job's command line has in common."""

    recipe: str
    settings: tuple[str, ...] = ()
    """`--set` options."""
    allow_outside: bool = False

    def arguments(self, *more: str) -> str:
        words = [self.recipe, *(word for pair in self.settings for word in ("--set", pair))]
        words += ["--allow-outside"] if self.allow_outside else []
        return shlex.join([*words, *more])


@dataclass(frozen=True)
class Matrix:
    """The form of a CI matrix."""

    command: Command
    """What the command lines of all jobs have in common."""
    shards: int | None = None
    """Number of jobs that share all the work; None: one job for each variant."""
    labels: tuple[str, ...] = ()
    """TARGET=RUNNER for targets that need a runner of their own; * stands for all targets."""
    all: bool = False
    """Includes variants that need no work."""


def labels(pairs: Iterable[str], targets: Iterable[str]) -> dict[str, str]:
    """`--label target=runner` options; the target may be `*`. Raises UsageError with every problem."""
    found, problems, known = {}, [], [*targets, ANY]
    for pair in pairs:
        target, equals, runner = pair.partition("=")
        if not equals or not target or not runner:
            problems.append(f"--label {pair}: write --label target=runner")
        elif target not in known:
            problems.append(f"--label {pair}: no variant is for '{target}'; {did_you_mean(target, known)}")
        found[target] = runner
    if problems:
        raise UsageError("\n".join(problems))
    return found


def runner(target: Target, given: Mapping[str, str]) -> str:
    """The label for a target: what was given for it, or for all, or what LABELS says."""
    usual = LABELS.get((target.system, target.architecture), OTHER)
    return given.get(target.name) or given.get(ANY) or usual


def reasons(graph: Graph, plan: Plan) -> dict[str, str]:
    """Why each step that is not done needs work: the reason of the first step before it that would run."""
    found: dict[str, str] = {}
    for planned in plan.steps:
        if planned.state == "run":
            found[planned.name] = f"{planned.name}: {planned.reason}"
        elif planned.state not in DONE:
            waits = (need for need in graph.needs(graph.step(planned.name)) if need in found)
            found[planned.name] = found[next(waits)]
    return found


def jobs(products: Sequence[Product], pipeline: Pipeline, plan: Plan, matrix: Matrix) -> list[Job]:
    """Returns a job for each variant that needs work, or jobs that share all the work. Raises UsageError."""
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
    products: Iterable[Product], pipeline: Pipeline, plan: Plan, given: Mapping[str, str], command: Command
) -> list[Job]:
    """A job for each variant, those that need no work too."""
    why = reasons(pipeline.graph, plan)
    jobs = []
    for product in products:
        planned = plan[pipeline.graph.resolve(product.last)]
        name, target = product.variant.name, product.variant.target
        arguments = command.arguments("--only", name)
        jobs.append(Job(name, runner(target, given), planned.key, why.get(planned.name, ""), arguments))
    return jobs


def shards(products: Sequence[Product], count: int, given: Mapping[str, str], command: Command) -> list[Job]:
    """Jobs that share the work of `products`, at most one for each of them."""
    count = min(count, len(products))
    only = [word for product in products for word in ("--only", product.variant.name)]
    label = given.get(ANY, OTHER)
    return [
        Job(f"shard {i} of {count}", label, None, "", command.arguments("--shard", f"{i}/{count}", *only))
        for i in range(1, count + 1)
    ]


def github(jobs: Iterable[Job]) -> str:
    """One line for $GITHUB_OUTPUT, to be read with fromJSON as a `matrix`."""
    return json.dumps({"include": [asdict(job) for job in jobs]}, ensure_ascii=False)


def gitlab(jobs: Sequence[Job]) -> str:
    """A child pipeline. JSON text is YAML; a pipeline must have a job, so without work it has one that
    says so."""
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
"""The template passes on how mlcbuild gets onto a runner."""
