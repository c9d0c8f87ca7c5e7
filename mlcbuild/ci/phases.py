"""A run in turns: what needs little of other machines first, then the rest after a new look at the stores."""

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
    turns: Sequence[tuple[str, ...] | None],
    sharing: Callable[[], Sharing],
    report: Reporter,
    cancel: Cancellation | None = None,
) -> RunResult:
    """Executes one turn after the other; each is the names of the steps wanted, None for all.

    `sharing` opens the store with its remotes, anew for each turn, since others write to them meanwhile. The
    result is that of one run. A turn after a failure happens only with `options.keep_going`, without
    what needs the failed steps. Raises as `execute` does.
    """
    whole, force = RunResult((), 0.0), graph.match(options.force)
    for turn in turns:
        failed = {step.name for step in whole.steps if step.status in ("failed", "skipped")}
        if whole.interrupted or (failed and not options.keep_going):
            break
        lost = {name: graph.closure((name,)) & failed for name in turn or ()} if failed else {}
        left = tuple(name for name in turn or () if not lost.get(name))
        if left or turn is None:
            done = frozenset(step.name for step in whole.steps)
            now = replace(options, only=left, force=tuple(sorted(force - done)))
            shared = sharing()
            whole = joined(whole, execute(graph, shared.store, now, report, shared, cancel))
        known = {step.name for step in whole.steps}
        skipped = [
            StepResult(name, "skipped", reason=f"needs {min(needs)}, which failed")
            for name, needs in lost.items()
            if needs and name not in known
        ]
        whole = replace(whole, steps=(*whole.steps, *skipped))
    return whole


def joined(before: RunResult, after: RunResult) -> RunResult:
    """Returns the result of two runs, one after the other, as that of one."""
    first = {step.name: step for step in before.steps}
    return RunResult(
        (*_later(first, after.steps), *first.values()),
        before.seconds + after.seconds,
        after.interrupted,
        after.stopped,
        {**before.not_uploaded, **after.not_uploaded},
    )


def _later(first: dict[str, StepResult], steps: Iterable[StepResult]) -> list[StepResult]:
    """Returns the results of a later turn; a step that it reused has the result of the turn that built it."""
    results = []
    for step in steps:
        earlier = first.pop(step.name, None)
        is_told = earlier is not None and earlier.status in ("built", "reused")
        results.append(earlier if earlier is not None and is_told and step.status == "reused" else step)
    return results
