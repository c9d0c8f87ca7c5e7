"""Runs a shard, the part of a build that one machine does, in two phases: first the build steps that need few
results of other shards, then the rest with the others' results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mlcbuild.build.events import Reporter, RunResult, StepResult
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.signals import Cancellation


def run(
    graph: Graph,
    options: Options,
    phases: Sequence[tuple[str, ...] | None],
    sharing: Callable[[], Sharing],
    report: Reporter,
    cancel: Cancellation | None = None,
) -> RunResult:
    """Executes the phases of one machine's share (shard) of a build, one after the other, and returns one
    result for all. phases: for each phase the names of its build steps, or None for all steps.

    sharing: function without arguments that returns a Sharing, the store with its remote caches; it is called
    for each phase, since other machines add results to these caches meanwhile. After a failure, a phase runs
    only with `options.keep_going`, and skips the steps that depend on failed ones; after an interruption,
    none runs. Raises UsageError for an unknown step name, SourceError for an unreadable source, and
    StoreError when the store cannot be used."""
    total, force = RunResult((), 0.0), graph.match(options.force)
    for turn in phases:
        failed = {step.name for step in total.steps if step.status in ("failed", "skipped")}
        if total.interrupted or (failed and not options.keep_going):
            break
        lost = {name: graph.closure((name,)) & failed for name in turn or ()} if failed else {}
        left = tuple(name for name in turn or () if not lost.get(name))
        if left or turn is None:
            done = frozenset(step.name for step in total.steps)
            now = replace(options, only=left, force=tuple(sorted(force - done)))
            shared = sharing()
            total = joined(total, execute(graph, shared.store, now, report, shared, cancel))
        step_names = {step.name for step in total.steps}
        skipped = [
            StepResult(name, "skipped", reason=f"needs {min(needs)}, which failed")
            for name, needs in lost.items()
            if needs and name not in step_names
        ]
        total = replace(total, steps=(*total.steps, *skipped))
    return total


def joined(before: RunResult, after: RunResult) -> RunResult:
    """Merges the results of two consecutive runs of a shard (one machine's share of a build) into a new one.
    Their durations are added. A step of both runs has the later result, unless the later run only reused what
    the first had built or reused: then it has the first."""
    first = {step.name: step for step in before.steps}
    return RunResult(
        (*_later(first, after.steps), *first.values()),
        before.seconds + after.seconds,
        after.interrupted,
        after.stopped,
        {**before.not_uploaded, **after.not_uploaded},
    )


def _later(first: dict[str, StepResult], steps: Iterable[StepResult]) -> list[StepResult]:
    """Returns the results of the build steps of a later phase of a shard (one machine's share of a build). A
    step that it only reused, and that an earlier phase of the shard had built or reused, keeps the earlier
    result. first: name of a step -> result of an earlier phase; steps of the later phase are removed from it.
    """
    results = []
    for step in steps:
        earlier = first.pop(step.name, None)
        is_told = earlier is not None and earlier.status in ("built", "reused")
        results.append(earlier if earlier is not None and is_told and step.status == "reused" else step)
    return results
