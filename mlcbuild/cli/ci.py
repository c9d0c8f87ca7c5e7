"""The verbs for CI systems: matrix, shard, report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mlcbuild.ci import job_matrix as matrices
from mlcbuild.ci import split as splits
from mlcbuild.ci.ci_reports import headline
from mlcbuild.cli.build import print_warnings, selection
from mlcbuild.cli.listing import show
from mlcbuild.cli.recipes import open_session
from mlcbuild.cli.store_access import open_store
from mlcbuild.durations import duration
from mlcbuild.errors import UsageError
from mlcbuild.selection import durations


def matrix(arguments: argparse.Namespace) -> int:
    command = matrices.Command(arguments.recipe, tuple(arguments.settings), arguments.allow_outside)
    form = matrices.Matrix(command, arguments.shards, tuple(arguments.label), arguments.all)
    jobs = open_session(arguments).jobs(form, selection(arguments), print_warnings)
    if arguments.format == "json":
        print(json.dumps([vars(job) for job in jobs], indent=2, ensure_ascii=False))
    else:
        print(matrices.github(jobs) if arguments.format == "github" else matrices.gitlab(jobs))
    return 0


def shard(arguments: argparse.Namespace) -> int:
    """Prints the shards (one machine's share of the work each) into which `run --shard` splits a build, and
    for each one its steps without a result in this store, with the time expected for all of them; returns
    exit code 0. With --record, first writes the durations that this store recorded to the file beside the
    recipe. Raises UsageError for a count below 1, for unknown names of variants or steps, and if there is
    nothing to record; InputError for a malformed file of durations."""
    session, chosen = open_session(arguments), selection(arguments)
    if arguments.record:
        session.record_durations()
    dealt = session.split(arguments.count, chosen, print_warnings)
    planned, file = session.over(()).plan(chosen).plan, durations(session.pipeline)
    pending = splits.pending(session.pipeline.graph, planned, session.store, file)
    lines, shards = [], []
    for index, part in enumerate(dealt.shards, 1):
        left = [name for name in part.steps if name in pending]
        seconds = sum(pending[name] for name in left)
        shards.append(
            {
                "steps": list(part.steps),
                "seconds": part.milliseconds / 1000,
                "to_run": left,
                "seconds_to_run": round(seconds, 3),
            }
        )
        work = f"{duration(seconds)} for {len(left)} steps" if left else "nothing to run"
        stored = len(part.steps) - len(left)
        lines.append(
            f"shard {index}/{arguments.count}: {work}" + (f", {stored} are stored" if stored else "")
        )
        lines += [f"  {name}" for name in left]
    lines.append(f"split {dealt.identity}, {_basis(file.name if file.exists() else '')}")
    show(arguments.json, {"split": dealt.identity, "shards": shards}, lines)
    return 0


def _basis(name: str) -> str:
    return f"by the durations in {name}" if name else "by estimates; --record writes what was measured"


def report(arguments: argparse.Namespace) -> int:
    """Writes an HTML page about the recipe's last run, compared with the run before it, if there is one, to
    the file that --output names, and returns exit code 0. The recipe is not read. Raises UsageError if it has
    not been run, or if the page cannot be written."""
    from mlcbuild.reports import page, runlog

    recipe, store = Path(arguments.recipe), open_store(arguments)
    logs = runlog.latest(store, recipe, 2)
    if not logs:
        raise UsageError(
            f"{recipe}: the store at {store.root} has no run of it to report; "
            f"run `mlcbuild run {recipe}` first"
        )
    before = logs[1] if len(logs) > 1 else None
    try:
        Path(arguments.output).write_text(page.html(logs[0], before), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: cannot be written: {error.strerror}") from None
    print(f"{arguments.output}: {headline(logs[0])}")
    return 0
